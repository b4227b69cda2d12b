"""Mathematical answers compared by value, through the math-verify package."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from gspo_megatron.errors import RewardError
from gspo_megatron.rewards.registry import register
from gspo_megatron.types import Sample


def answer_fault(answer: str) -> str | None:
    """What keeps `math` from comparing with an answer; None: nothing. Cheap for most answers."""
    if _parses_surely(answer) or _parse_answer(answer):
        return None
    return "is not a mathematical expression"


@register("math", requires="math-verify", answer_fault=answer_fault)
def math(sample: Sample) -> float:
    r"""1.0 if the response's final expression equals the answer, else 0.0.

    math-verify finds the expression (\boxed{...} first, then other LaTeX, then plain numbers) and
    compares by value: 1/2, 0.5 and \frac{1}{2} are the same. The answer may be plain, or LaTeX
    with or without $...$ or \boxed{...}. A response without any expression is worth 0.0.

    Raises RewardError where the answer itself is not an expression.
    """
    from math_verify import parse, verify

    answer = _parse_answer(sample.answer)
    if not answer:
        raise RewardError(
            f"reward 'math': the answer {sample.answer!r} of prompt {sample.prompt!r} is not a "
            "mathematical expression"
        )
    return float(verify(answer, parse(sample.response)))


def _parses_surely(answer: str) -> bool:
    """Whether math-verify, at milliseconds an answer, need not be asked: of what stands in a frame
    it takes at least the text, unless the text is none or ends the frame."""
    if any(mark in answer for mark in ("$", r"\boxed", r"\text")):
        return False
    depth = 0
    for character in answer:
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth < 0:
            return False
    return any(character.isalnum() for character in answer)


@lru_cache(maxsize=1024)  # every response of a group has the same answer
def _parse_answer(answer: str) -> list[Any]:
    from math_verify import parse

    # Bare LaTeX is not recognised as such: x^2+1 would not parse without a frame.
    framed = "$" in answer or r"\boxed" in answer
    return parse(answer if framed else rf"\boxed{{{answer}}}")
