from __future__ import annotations

import random
import sys

import pytest

from gspo_megatron.errors import RewardError
from gspo_megatron.rewards.math import _is_surely_readable, _parse_answer
from gspo_megatron.rewards.registry import Reward, check_answers, get_reward
from gspo_megatron.types import Prompt, Sample
from tests.unit.data.corpora import refusal
from tests.unit.rewards.scoring import score

EXACT, SHARE = get_reward("exact_match"), get_reward("per_character")


def sample(answer: str | float, response: str) -> Sample:
    return Sample(prompt="p", answer=answer, response=response, truncated=False)


@pytest.mark.parametrize(
    ("reward", "answer", "response", "expected"),
    [
        (EXACT, "82", "82", 1.0),
        (EXACT, "82", "83", 0.0),
        (EXACT, "82", "82 ", 1.0),
        (get_reward("exact_match", options={"strip": False}), "82", "82 ", 0.0),
        (EXACT, "82", "8 2", 0.0),
        (EXACT, "82", "", 0.0),
        (EXACT, "Yes", "yes", 0.0),
        (get_reward("exact_match", options={"ignore_case": True}), "Yes", "yes", 1.0),
        (SHARE, "dbac", "dbac", 1.0),
        (SHARE, "dbac", "dbca", 0.5),
        (SHARE, "dbac", "dba", 0.75),
        (SHARE, "dbac", "dbacd", 0.8),
        (SHARE, "dbac", "xdbac", 0.0),
        (SHARE, "dbac", "", 0.0),
        (SHARE, "", "", 1.0),
        (SHARE, "", "a", 0.0),
    ],
)
def test_text_is_compared(reward: Reward, answer: str, response: str, expected: float) -> None:
    assert score(reward, sample(answer, response)) == expected


def test_math_without_its_package_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(RewardError, match="needs the package math-verify: pip install math-verify"):
        get_reward("math")


@pytest.mark.parametrize("answer", ["", "about {}", "$?$"])
def test_math_refuses_an_answer_that_is_no_expression(answer: str) -> None:
    pytest.importorskip("math_verify")
    (line,) = refusal(score, get_reward("math"), sample(answer, "3"))
    assert f"the answer {answer!r} of prompt 'p' is not a mathematical" in line


def test_answers_that_math_cannot_read_are_named_beforehand() -> None:
    pytest.importorskip("math_verify")
    answers = ["1", "", r"\frac{1}{2}", "about {}", "x^2", "}", "$", "", "''", r"\boxed{3}", "$2$"]
    answers += ["-1,000.5", r"A \cup B", "(1, 2)"]
    prompts = [Prompt("p", answer, f"p.jsonl:{n}") for n, answer in enumerate(answers, start=1)]
    fault = "is not a mathematical expression, or is too large to compute (reward 'math')"
    assert refusal(check_answers, get_reward("math"), prompts) == [
        f"p.jsonl:2: the answer '' {fault}",
        f"p.jsonl:4: the answer 'about {{}}' {fault}",
        f"p.jsonl:6: the answer '}}' {fault}",
        f"p.jsonl:7: the answer '$' {fault}",
        f"p.jsonl:8: the answer '' {fault}",
        "… and 1 more answers",
    ]
    check_answers(get_reward("math"), [prompts[0], prompts[2], *prompts[9:]])
    for name in ("exact_match", "per_character"):  # these rewards compare any texts
        check_answers(get_reward(name), prompts)


def test_answers_of_another_type_are_named_beforehand() -> None:
    answers = ["1", 1, 0.5, True, None, ["1"], {"a": 1}]
    prompts = [Prompt("p", answer, f"p.jsonl:{n}") for n, answer in enumerate(answers, start=1)]
    for name in ("exact_match", "per_character"):
        assert refusal(check_answers, get_reward(name), prompts[:3]) == [
            f"p.jsonl:{n}: the answer {answers[n - 1]} is not a string (reward {name!r})"
            for n in (2, 3)
        ]
    check_answers(Reward("own", len), prompts)
    pytest.importorskip("math_verify")
    assert [line.split()[3] for line in refusal(check_answers, get_reward("math"), prompts)] == [
        *("True", "None", "['1']", "{'a':")
    ]


def test_answers_that_are_surely_readable_can_be_read() -> None:
    pytest.importorskip("math_verify")
    source = random.Random(3)
    parts = [*"ab12 +-*/^_{}()[].,=:%é|<>\"'\\", r"\frac{1}{2}", r"\{", r"\sqrt{", r"\left(", "or"]
    numbers = [f"{source.choice(('', '-'))}{source.randrange(10**6):,}.5" for _ in range(100)]
    texts = ["".join(source.choices(parts, k=source.randint(1, 6))) for _ in range(3000)]
    sure = [answer for answer in numbers + texts if _is_surely_readable(answer)]
    assert [answer for answer in sure if not _parse_answer(answer)] == []
    assert set(numbers) < set(sure) and len(sure) > 600
