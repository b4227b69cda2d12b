"""Answers with values that cannot be computed. They score 0 after about a second, and the run
continues."""

from __future__ import annotations

import signal
import time

import pytest

from gspo_megatron.errors import RewardError
from gspo_megatron.rewards import math as module
from gspo_megatron.rewards.math import math, read_answer
from gspo_megatron.rewards.registry import check_answers, get_reward
from gspo_megatron.types import Prompt, Sample

pytest.importorskip("math_verify")


def answered(response: str, answer: str = "5") -> Sample:
    return Sample("p", answer, response, truncated=False)


@pytest.fixture(autouse=True)
def _warm() -> None:
    assert math(answered(r"\boxed{\frac{10}{2}}")) == 1.0  # the first call loads the grammars


@pytest.mark.parametrize(
    "response",
    [
        r"\boxed{9^{9^{9^{9}}}}",
        r"\boxed{((9!)!)!}",
        r"\boxed{\binom{10000000}{5000000}}",
        r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}+\begin{pmatrix}3\\4\end{pmatrix}}",
        r"\boxed{2^{" + "9" * 320 + "}}",
        r"\boxed{\frac{3^{1000000}}{7^{600000}}}",  # its gcd is one step of a minute
        r"\boxed{" + "(" * 500 + "1" + ")" * 500 + "}",
    ],
)
def test_a_tower_costs_its_time(response: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert module._SECONDS <= 1.0
    monkeypatch.setattr(module, "_SECONDS", 0.2)
    for function in (module.math, module.read_answer):
        began = time.process_time()
        assert function(answered(response)) != 1.0
        assert time.process_time() - began < 1.0
    # The timer is off again.
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGPROF) == signal.SIG_DFL


@pytest.mark.parametrize(
    "response",
    [
        r"\boxed{" + "9" * 5000 + "}",
        r"\boxed{10^{5000}}",
        r"\boxed{\infty}",
        r"\boxed{-\infty}",
        r"\boxed{\frac{1}{0}}",
        r"\boxed{0^0}",
        r"\boxed{1e999}",
        "\\boxed{\ud800}",
        "\\boxed{\0}",
        r"\boxed{",
        r"\boxed{}" * 100,
    ],
)
def test_no_answer_raises(response: str) -> None:
    assert math(answered(response)) == 0.0
    found = read_answer(answered(response))
    assert found is None or isinstance(found, str)


@pytest.mark.parametrize(
    "answer",
    [
        r"\binom{10000000}{5000000}",
        r"\gcd(10^{10^9},3)",
        "9" * 5000,
        r"\frac{9}{" * 2000 + "1" + "}" * 2000,
    ],
    ids=["binomial", "power", "digits", "depth"],
)
def test_an_answer_that_takes_too_long_to_read_is_told_before_the_run(answer: str) -> None:
    """In a run it would end the step, because no response can be compared with it."""
    prompts = [Prompt("p", "5", "p.jsonl:1"), Prompt("p", answer, "p.jsonl:2")]
    with pytest.raises(RewardError) as told:
        check_answers(get_reward("math"), prompts)
    (line,) = str(told.value).splitlines()
    assert line.startswith("p.jsonl:2: the answer ") and "is too large to compute" in line
    assert len(line) < 400


@pytest.mark.parametrize("answer", [r"\ldots", r"\displaystyle"])
def test_an_answer_that_no_check_refuses_does_not_end_the_run(answer: str) -> None:
    """math-verify drops these commands, and nothing is left of the answer."""
    check_answers(get_reward("math"), [Prompt("p", answer, "p.jsonl:1")])
    assert math(answered(r"\boxed{3}", answer)) == 0.0


def test_large_values_that_can_be_computed_are_compared() -> None:
    assert math(answered(r"\boxed{2^{100}}", "1267650600228229401496703205376")) == 1.0
    assert math(answered(r"\boxed{20!}", "2432902008176640000")) == 1.0
    # equal texts need no computation
    assert math(answered(r"\boxed{9^{9^{9}}}", "9^{9^{9}}")) == 1.0
