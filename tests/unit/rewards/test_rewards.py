from __future__ import annotations

import sys

import pytest

from gspo_megatron.errors import RewardError
from gspo_megatron.rewards import get_reward, reward_names, score
from gspo_megatron.types import Sample


def sample(answer: str, response: str) -> Sample:
    return Sample(prompt="p", answer=answer, response=response, truncated=False)


def test_registered_names() -> None:
    assert reward_names() == ["exact_match", "math", "per_character"]


@pytest.mark.parametrize(
    ("answer", "response", "options", "expected"),
    [
        ("82", "82", {}, 1.0),
        ("82", "83", {}, 0.0),
        ("82", "82 ", {}, 1.0),
        ("82", "82 ", {"strip": False}, 0.0),
        ("82", "8 2", {}, 0.0),
        ("82", "", {}, 0.0),
        ("Yes", "yes", {}, 0.0),
        ("Yes", "yes", {"ignore_case": True}, 1.0),
    ],
)
def test_exact_match(answer: str, response: str, options: dict, expected: float) -> None:
    assert score(get_reward("exact_match", options=options), sample(answer, response)) == expected


@pytest.mark.parametrize(
    ("answer", "response", "expected"),
    [
        ("dbac", "dbac", 1.0),
        ("dbac", "dbca", 0.5),
        ("dbac", "dba", 0.75),
        ("dbac", "dbacd", 0.8),
        ("dbac", "xdbac", 0.0),
        ("dbac", "", 0.0),
        ("", "", 1.0),
        ("", "a", 0.0),
    ],
)
def test_per_character(answer: str, response: str, expected: float) -> None:
    assert score(get_reward("per_character"), sample(answer, response)) == expected


def test_math_without_its_package_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(RewardError, match="needs the package math-verify: pip install math-verify"):
        get_reward("math")


@pytest.mark.parametrize(
    ("answer", "response", "expected"),
    [
        ("82", "The answer is 82.", 1.0),
        ("82", "The answer is 83.", 0.0),
        ("1/2", r"so \boxed{0.5}", 1.0),
        (r"\frac{1}{2}", "$0.5$", 1.0),
        ("x^2+1", "$1+x^2$", 1.0),
        (r"$\frac12$", "1/2", 1.0),
        ("1,000", "1000", 1.0),
        ("3", "", 0.0),
        ("3", "no number here", 0.0),
    ],
)
def test_math_compares_by_value(answer: str, response: str, expected: float) -> None:
    pytest.importorskip("math_verify")
    assert score(get_reward("math"), sample(answer, response)) == expected


def test_math_refuses_an_answer_that_is_no_expression() -> None:
    pytest.importorskip("math_verify")
    with pytest.raises(RewardError, match="the answer '' of prompt 'p' is not a mathematical"):
        score(get_reward("math"), sample("", "3"))
