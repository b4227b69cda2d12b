"""Rules for combinations of the keys of evaluation suites, also with keys of other sections."""

from __future__ import annotations

import contextlib
import os

from gspo_megatron.config.model_rules import Plan, Problems
from gspo_megatron.config.reward_model import reward_model_problems
from gspo_megatron.config.schema import EvaluationSection, RewardSection, SuiteSection, suite_key
from gspo_megatron.errors import UnknownValueError

_SHAPING = ("scale", "clip", "overlong_buffer", "overlong_penalty")
_SHAPING += ("repetition_penalty", "repetition_words")


def suites_fit(plan: Plan) -> Problems:
    """Check that every suite can be generated and scored, and that evaluation.interval is set only
    with suites."""
    section = plan.config.evaluation
    if section.interval and not section.suites:
        wrong = "there is no suite to evaluate; allowed: 0, or give evaluation.suites"
        yield "evaluation.interval", wrong
    yield from suite_problems(section)
    for name, suite in section.suites.items():
        key = f"{suite_key(name)}.max_response_tokens"
        if plan.config.environment.has_episodes and suite.max_response_tokens is not None:
            wrong = "episodes of several turns end at rollout.max_response_tokens; allowed: null"
            yield key, wrong
        longest, response = plan.shape.max_sequence_length, plan.config.suite_response_tokens(name)
        if response >= longest:
            wrong = f"{response} leave no room for a prompt in max_sequence_length = {longest}"
            yield key, f"{wrong}; allowed: at most {longest - 1}"


def suite_problems(section: EvaluationSection) -> Problems:
    """Yield the problems of suites that need no other section."""
    for name, suite in section.suites.items():
        with contextlib.suppress(UnknownValueError):
            yield from _problems_of_suite(name, suite)


def _problems_of_suite(name: str, suite: SuiteSection) -> Problems:
    key = suite_key(name)
    if suite.samples > 1 and suite.temperature == 0:
        wrong = f"greedy responses are all the same, and samples = {suite.samples}; allowed: "
        yield f"{key}.temperature", f"{wrong}above 0, or samples = 1"
    wrong = "rewards of an evaluation are not shaped; allowed: leave it out"
    for each, _ in suite.reward.unread(_SHAPING, wrong):
        yield f"{key}.reward.{each}", wrong
    yield from _problems_of_model(key, suite.reward)
    if suite.failed == "wrong" and suite.reward.on_failure != "drop_group":
        wrong = f"nothing reads it: {key}.reward.on_failure = {suite.reward.on_failure} ends the "
        yield f"{key}.failed", f"{wrong}evaluation; allowed: drop_group there"
    window = suite.filter
    if window.field is None and (window.first or window.last):
        wrong = "nothing tells which field has the date; allowed: the name of a field"
        yield f"{key}.filter.field", wrong
    first, last = window.first or "", window.last or "9999"
    size = min(len(first), len(last))
    if first[:size] > last[:size]:
        wrong = f"before filter.first = {first}; allowed: from that on"
        yield f"{key}.filter.last", wrong
    yield from _problems_of_rows(key, suite)


def _problems_of_rows(key: str, suite: SuiteSection) -> Problems:
    """Yield the problems of the keys that say which files a suite reads, and which fields."""
    if suite.format is not None:
        wrong = f"{key}.format = {suite.format} names it"
        for name, told in suite.unread(("prompt_field", "answer_field"), wrong):
            yield f"{key}.{name}", told
    elif suite.template is not None and suite.prompt_field != "prompt":
        yield f"{key}.prompt_field", f"{key}.template makes the prompt; allowed: prompt"
    if not suite.prompts:
        yield f"{key}.prompts", "there is nothing to evaluate on; allowed: a file, or several"
    elif len({os.path.abspath(path) for path in suite.prompts}) < len(suite.prompts):
        yield f"{key}.prompts", "a file is listed twice; allowed: once"


def _problems_of_model(key: str, reward: RewardSection) -> Problems:
    """Yield the problems of a suite's reward model. Only a server can compute its scores."""
    for name, wrong in reward_model_problems(reward):
        yield f"{key}.reward.{name}", wrong
    if reward.model.folder is not None:
        wrong = "the training ranks compute only the run's own reward.model"
        yield f"{key}.reward.model.folder", f"{wrong}; allowed: model.url"
    if reward.model.normalize != "none":
        wrong = "scores of an evaluation are not normalised; allowed: none"
        yield f"{key}.reward.model.normalize", wrong
