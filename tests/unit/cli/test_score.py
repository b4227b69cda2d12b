"""The output of `score` for a response."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.unit.cli.conftest import Command, ConfigWriter

REWARD = """
from gspo_megatron.types import Reasoned, TurnRewards

def why(sample):
    return Reasoned(0.5, f"{sample.num_tokens} tokens for {sample.prompt}")

def parts(sample):
    return {"long": len(sample.response), "right": sample.response == sample.answer}

def turns(sample):
    return TurnRewards([0.5, 0.25], [1, sample.num_tokens])

def prompt_tokens(sample):
    return sample.num_prompt_tokens

def fails(sample):
    raise KeyError(sample.row_id)
"""


@pytest.fixture
def config(write_config: ConfigWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scoring_by_hand.py").write_text(REWARD)
    return write_config()


def lines(out: str) -> list[list[str]]:
    return [line.split(maxsplit=1) for line in out.splitlines()]


def test_a_response_is_scored_as_in_the_phase_of_a_step(
    gspo: Command, config: Path, tmp_path: Path
) -> None:
    (tmp_path / "later.jsonl").write_text('{"prompt": "hg", "answer": "gh"}\n')
    later = "{data: {prompts: later.jsonl}, reward: {name: exact_match}}"
    first = "{until_step: 3, reward: {name: per_character}}"
    given = (f"training.phases=[{first}, {later}]", "training.steps=9", "checkpoint.interval=1")
    words = ("score", config, *given, "--response", "ab")
    code, out, err = gspo(*words)
    assert code == 0, err
    assert lines(out)[0] == ["phase", "1 of 2, which ends with step 3"]
    assert ["prompt", '"abc"'] in lines(out) and "(per_character)" in out
    code, out, err = gspo(*words, "--step", "4")
    assert code == 0, err
    assert lines(out)[0] == ["phase", "2 of 2, which ends with step 9"]
    assert ["prompt", '"hg"'] in lines(out) and "(exact_match)" in out
    code, _, err = gspo("score", config, "--response", "ab", "--step", "4")
    assert (code, err) == (2, "--step 4: only with training.phases; leave it out\n")


def test_a_response_is_scored_with_the_first_prompt_or_that_of_a_row(
    gspo: Command, config: Path, tmp_path: Path
) -> None:
    code, out, _ = gspo("score", config, "--response", "cba")
    assert (code, lines(out)) == (
        0,
        [
            ["row", "prompts.jsonl:1"],
            ["prompt", '"abc"'],
            ["answer", '"cba"'],
            ["read", '"cba"'],
            ["reward", "1 (exact_match)"],
        ],
    )
    (tmp_path / "response.txt").write_text(" ab\n")
    words = ("--file", tmp_path / "response.txt", "--row", "prompts.jsonl:2")
    code, out, _ = gspo("score", config, *words)
    assert (code, lines(out)[1][1], lines(out)[-1][1]) == (0, '"hgfed"', "0 (exact_match)")


@pytest.mark.parametrize(
    ("name", "workers", "told"),
    [
        ("why", 0, [["reward", "0.5"], ["reason", "3 tokens for abc"]]),
        # a reward worker gives the same output
        ("why", 1, [["reward", "0.5"], ["reason", "3 tokens for abc"]]),
        ("parts", 0, [["reward", "2.5"], ["part", "long 2"], ["part", "right 0"]]),
        ("turns", 0, [["reward", "0.75"], ["turns", "0.5 0.25"]]),
        ("prompt_tokens", 0, [["reward", "3"]]),  # as a run counts them
    ],
)
def test_parts_turns_and_reasons_are_shown(
    gspo: Command, config: Path, name: str, workers: int, told: list[list[str]]
) -> None:
    path = f"scoring_by_hand:{name}"
    words = [f"reward.import_path={path}", f"reward.workers={workers}"]
    if name == "parts":
        words.append("reward.weights={long: 1.25}")
    code, out, err = gspo("score", config, *words, "--response", "ab")
    told[0][1] += f" ({path})"
    assert (code, lines(out)[3:]) == (0, told), err


def test_why_a_program_failed(gspo: Command, tmp_path: Path, config: Path) -> None:
    """`score --suite` takes the prompts and the reward from the suite."""
    tests = {"inputs": ["1", "2"], "outputs": ["1", "3"]}
    (tmp_path / "code.jsonl").write_text(json.dumps({"prompt": "p", **tests}) + "\n")
    suite = f"{{prompts: {tmp_path}/code.jsonl, answer_field: , reward: {{name: code}}}}"
    words = (f"evaluation.suites={{programs: {suite}}}", "--suite", "programs")
    program = "```python\nprint(input())\n```"
    code, out, err = gspo("score", config, *words, "--response", program)
    assert code == 0, err
    assert lines(out)[-2:] == [["reward", "0 (code)"], ["reason", "test 2: wrong output"]]
    code, out, _ = gspo("score", config, *words, "--response", "no program")
    assert lines(out)[-1] == ["reason", "no fenced block with a program"]


def test_a_file_of_a_response_that_cannot_be_read_is_named_once(
    gspo: Command, config: Path, tmp_path: Path
) -> None:
    code, _, err = gspo("score", config, "--file", "none")
    assert (code, err) == (2, "--file none: cannot be read: No such file or directory\n")
    (tmp_path / "bytes").write_bytes(b"\xff")
    code, _, err = gspo("score", config, "--file", "bytes")
    assert code == 2 and err.startswith("--file bytes: not a text file: ")
    # Python reads bytes of the command line that are no UTF-8 as halves of surrogate pairs.
    code, _, err = gspo("score", config, "--response", os.fsdecode(b"a\xff"))
    assert (code, err) == (2, "--response: it holds half a surrogate pair at character 2\n")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--row", "x"), "--row x: no row of"),
        (("--suite", "x"), "--suite x: no such suite; allowed: none"),
        (("data.prompts=",), "data.prompts = null: no prompt to score"),
        (("reward.import_path=scoring_by_hand:fails",), "raised KeyError: 'prompts.jsonl:1'"),
        (("reward.on_failure=drop_group", "reward.import_path=scoring_by_hand:fails"), "KeyError"),
    ],
)
def test_what_cannot_be_scored(
    gspo: Command, config: Path, words: tuple[str, ...], problem: str
) -> None:
    code, _, err = gspo("score", config, "reward.retries=0", *words, "--response", "a")
    assert code == 2 and problem in err and "Traceback" not in err
    assert len(err.splitlines()) == 1
