"""`gspo-megatron score`: scores a response of your own as a run would score it, and explains the
score."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from typing import TYPE_CHECKING

from gspo_megatron.cli.arguments import Commands, add_step, config_parser, in_phase
from gspo_megatron.errors import ConfigError, DataError, printable

if TYPE_CHECKING:
    from gspo_megatron.config.schema import Config
    from gspo_megatron.rewards.registry import Reward
    from gspo_megatron.rewards.values import Score
    from gspo_megatron.types import Prompt, Sample


def add_parser(commands: Commands) -> None:
    text, more = "score one response by the configured reward", ", and print the reward, its parts "
    parser = config_parser(commands, "score", run, text, f"{more}and the reason for it.")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--response", metavar="TEXT", help="the response")
    source.add_argument(
        "--file", metavar="FILE", help="the file that holds the response; -: standard input"
    )
    parser.add_argument(
        "--row",
        metavar="ID",
        help="the id of the prompt's row, as samples.jsonl has it (default: the first prompt's)",
    )
    parser.add_argument(
        "--suite", metavar="NAME", help="the prompt and the reward of this evaluation suite"
    )
    add_step(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the score. Raises UserError."""
    from gspo_megatron.config import load_config
    from gspo_megatron.config.schema import suite_key
    from gspo_megatron.environments.registry import environment_of
    from gspo_megatron.rewards.registry import check_answers, reward_of, suite_rewards

    config = load_config(arguments.config, arguments.overrides)
    config, phase = in_phase(config, arguments.step)
    suites = config.evaluation.suites
    if arguments.suite is not None and arguments.suite not in suites:
        names = ", ".join(suites) or "none: the configuration has no evaluation.suites"
        raise ConfigError([f"--suite {arguments.suite}: no such suite; allowed: {names}"])
    if arguments.suite is not None:
        section, keys = suites[arguments.suite].reward, [suite_key(arguments.suite)]
        reward = suite_rewards({arguments.suite: suites[arguments.suite]})[arguments.suite]
    else:
        section, keys = config.reward, ["data.prompts", "data.eval_prompts"]
        if getattr(environment_of(config), "gives_rewards", False):
            wrong = "it gives the rewards itself (gives_rewards), so there is no function to call"
            raise ConfigError([f"environment: {wrong}; allowed: --suite NAME"])
        reward = reward_of(section)
    if (folder := section.model.folder) is not None:
        wrong = "only the training ranks compute its scores; allowed here: reward.model.url"
        raise ConfigError([f"reward.model.folder = {folder}: {wrong}"])
    prompt = _prompt(config, keys, arguments.row)
    check_answers(reward, [prompt])
    sample = _sample(config, prompt, _response(arguments))
    # With "stop", a failed call of the reward is reported and ends the command.
    section = section.model_copy(update={"on_failure": "stop"})
    from gspo_megatron.rewards.scoring import Scorer
    from gspo_megatron.rollout.reward_model import with_model

    with contextlib.closing(Scorer(reward, section)) as scorer:
        scores, _ = scorer.score([sample])
    (score,) = with_model(section, [sample], scores)
    assert score is not None
    lines = _lines(reward, sample, score)
    for name, text in lines if phase is None else [("phase", phase), *lines]:
        print(f"{name:8} {printable(text)}")
    return 0


def _prompt(config: Config, keys: list[str], row: str | None) -> Prompt:
    """Return the prompt of the row with the id `row`; None: the first prompt. Raises ConfigError
    and DataError."""
    from gspo_megatron.data.inputs import prompt_forms
    from gspo_megatron.data.prompts import load_prompts

    forms, files = prompt_forms(config), config.input_files()
    paths = [(key, path) for key in keys for path in files.get(key, ())]
    if not paths:
        raise ConfigError([f"{keys[0]} = null: no prompt to score a response to; give a file"])
    for key, path in paths:
        for prompt in load_prompts(path, forms[key].fields, forms[key].chat_template):
            if row is None or prompt.row_id == row:
                return prompt
    read = ", ".join(path for _, path in paths)
    raise DataError(
        f"--row {row}: no row of {read} has this id; allowed: an id, or FILE:LINE for rows without"
    )


def _response(arguments: argparse.Namespace) -> str:
    """Return the response. Raises DataError."""
    from gspo_megatron.data.rows import text_fault

    name = arguments.file
    if name is None:
        if fault := text_fault(arguments.response):  # bytes of the command line that are no UTF-8
            raise DataError(f"--response: it {fault}")
        return str(arguments.response)
    try:
        with open(0 if name == "-" else name, encoding="utf-8", closefd=name != "-") as file:
            return file.read()
    except OSError as error:
        wrong = f"cannot be read: {error.strerror or error}"
        raise DataError(f"--file {name}: {wrong}") from error
    except ValueError as error:  # no UTF-8, or a NUL in the file's name
        raise DataError(f"--file {name}: not a text file: {error}") from error


def _sample(config: Config, prompt: Prompt, response: str) -> Sample:
    from gspo_megatron.data.prompts import encode_prompts
    from gspo_megatron.data.tokenizers import load_tokenizer
    from gspo_megatron.environments.registry import tools_of
    from gspo_megatron.types import Sample

    options, tools = config.data.chat_template_options, tools_of(config)
    options = {**options, "tools": tools} if tools else options
    tokenizer = load_tokenizer(config.data.tokenizer, options)
    (encoded,) = encode_prompts([prompt], tokenizer, sys.maxsize)
    return Sample(
        prompt=prompt.text,
        answer=prompt.answer,
        response=response,
        truncated=False,
        fields=prompt.fields,
        num_tokens=len(tokenizer.encode(response)) + 1,  # 1 for the end-of-sequence token
        messages=prompt.messages,
        row_id=prompt.row_id,
        num_prompt_tokens=len(encoded.token_ids),
    )


def _lines(reward: Reward, sample: Sample, score: Score) -> list[tuple[str, str]]:
    """Return the names and texts to print."""
    from gspo_megatron.observe.metrics_files import jsonable, written_answer

    def shown(value: object) -> str:
        return json.dumps(jsonable(value), ensure_ascii=False)

    lines = [("row", sample.row_id), ("prompt", shown(sample.prompt))]
    if (answer := written_answer(sample)) is not None:
        lines.append(("answer", shown(answer)))
    if reward.read_answer is not None:
        lines.append(("read", shown(reward.answer_in(sample))))
    lines.append(("reward", f"{score.rewards.sum():g} ({reward.name})"))
    if score.ends is not None:
        lines.append(("turns", " ".join(f"{value:g}" for value in score.rewards)))
    lines += [("part", f"{name} {value:g}") for name, value in score.parts.items()]
    if score.reason:
        lines.append(("reason", score.reason))
    return lines
