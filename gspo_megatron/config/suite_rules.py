"""Rules for combinations of the keys of evaluation suites, also with keys of other sections."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

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
    for key, _, wrong in suite_problems(section):
        yield key, wrong
    for name, suite in section.suites.items():
        key = f"{suite_key(name)}.max_response_tokens"
        if plan.config.environment.has_episodes and suite.max_response_tokens is not None:
            wrong = "episodes of several turns end at rollout.max_response_tokens; allowed: null"
            yield key, wrong
        longest, response = plan.shape.max_sequence_length, plan.config.suite_response_tokens(name)
        if response >= longest:
            wrong = f"{response} leave no room for a prompt in max_sequence_length = {longest}"
            yield key, f"{wrong}; allowed: at most {longest - 1}"


def suite_problems(section: EvaluationSection) -> Iterator[tuple[str, Any, str]]:
    """Yield (key, value, problem) for each problem of suites that needs no other section."""
    for name, suite in section.suites.items():
        with contextlib.suppress(UnknownValueError):
            yield from _problems_of_suite(name, suite)


def _problems_of_suite(name: str, suite: SuiteSection) -> Iterator[tuple[str, Any, str]]:
    key, shaping = suite_key(name), RewardSection.model_fields
    if suite.samples > 1 and suite.temperature == 0:
        wrong = f"greedy responses are all the same, and samples = {suite.samples}; allowed: "
        yield f"{key}.temperature", suite.temperature, f"{wrong}above 0, or samples = 1"
    for each in _SHAPING:
        value = getattr(suite.reward, each)
        if value != shaping[each].default:
            wrong = "rewards of an evaluation are not shaped; allowed: leave it out"
            yield f"{key}.reward.{each}", value, wrong
    yield from _problems_of_model(key, suite.reward)
    if suite.failed == "wrong" and suite.reward.on_failure != "drop_group":
        wrong = f"nothing reads it: {key}.reward.on_failure = {suite.reward.on_failure} ends the "
        yield f"{key}.failed", suite.failed, f"{wrong}evaluation; allowed: drop_group there"
    window = suite.filter
    if window.field is None and (window.first or window.last):
        wrong = "nothing tells which field has the date; allowed: the name of a field"
        yield f"{key}.filter.field", None, wrong
    first, last = window.first or "", window.last or "9999"
    size = min(len(first), len(last))
    if first[:size] > last[:size]:
        wrong = f"before filter.first = {first}; allowed: from that on"
        yield f"{key}.filter.last", window.last, wrong


def _problems_of_model(key: str, reward: RewardSection) -> Iterator[tuple[str, Any, str]]:
    """Yield the problems of a suite's reward model. Only a server can compute its scores."""
    for name, value, wrong in reward_model_problems(reward):
        yield f"{key}.reward.{name}", value, wrong
    if reward.model.folder is not None:
        wrong = "the training ranks compute only the run's own reward.model"
        yield f"{key}.reward.model.folder", reward.model.folder, f"{wrong}; allowed: model.url"
    if reward.model.normalize != "none":
        wrong = "scores of an evaluation are not normalised; allowed: none"
        yield f"{key}.reward.model.normalize", reward.model.normalize, wrong
