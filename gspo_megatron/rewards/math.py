"""Mathematical answers compared by value, with the math-verify package."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from gspo_megatron.errors import RewardError
from gspo_megatron.rewards.math_value import value_text
from gspo_megatron.rewards.registry import register
from gspo_megatron.types import Sample

_NUMBER = re.compile(r"-?\d+(,\d{3})*(\.\d+)?")
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_COMMAND = re.compile(r"\\(?!boxed|text)[A-Za-z]")
# CPU time of a response: towers of powers and factorials have values that nobody can compute. Wall
# time, which math-verify counts, would also punish a right answer on a machine that is busy.
_SECONDS, _AGAIN_SECONDS = 1.0, 0.1


class _TooLongError(BaseException):
    """The time is over. No Exception, which sympy would take for one of its own."""


def answer_fault(answer: str) -> str | None:
    """Why `math` cannot compare with an answer; None: it can. Cheap for most answers."""
    if _is_surely_readable(answer) or _parse_answer(answer):
        return None
    return "is not a mathematical expression"


def read_answer(sample: Sample) -> str | None:
    r"""The value of the last \boxed{...}, else of the response's final expression, as text: 1/2,
    0.5 and 50\% are one answer, and so are x=5 and \frac{10}{2}. None without an expression."""
    from math_verify import parse

    response = _with_boxes(sample.response)
    try:
        with _limited():
            forms = parse(response[max(response.rfind(r"\boxed"), 0) :])
            return value_text(forms[0]) if forms else None
    except (_TooLongError, ArithmeticError, ValueError, TypeError, RecursionError, MemoryError):
        return None  # a value whose digits nobody can write


@register(
    "math",
    answers=(str, int, float),
    requires="math-verify",
    answer_fault=answer_fault,
    workers=1,  # it has hung on odd LaTeX, and its time-outs want a main thread
    read_answer=read_answer,
)
def math(sample: Sample) -> float:
    r"""1.0 if the response's final expression equals the answer, else 0.0.

    math-verify finds the expression (\boxed{...} first, then other LaTeX, then plain numbers) and
    compares by value: 1/2, 0.5 and \frac{1}{2} are the same. If there are several \boxed{...}, all
    of them together may be the answer (a set), or the last one. The answer may be plain text, or
    LaTeX with or without $...$ or \boxed{...}. A response without any expression scores 0.0, and so
    does one whose value takes more than a second to compute.

    Raises RewardError if the answer is not a mathematical expression.
    """
    from math_verify import parse, verify

    answer = _parse_answer(str(sample.answer))
    if not answer:
        raise RewardError(
            f"reward 'math': the answer {sample.answer!r} of prompt {sample.prompt!r} is not a "
            "mathematical expression"
        )
    response = _with_boxes(sample.response)
    last_box = response.rfind(r"\boxed")
    try:
        with _limited():
            is_right = verify(answer, parse(response))
            if not is_right and last_box > 0:
                is_right = verify(answer, parse(response[last_box:]))
    except _TooLongError:
        return 0.0
    return float(is_right)


@contextmanager
def _limited() -> Generator[None]:
    """Raises _TooLongError after so much CPU time of this process, in its main thread. Elsewhere
    there are no signals, and math-verify refuses."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    is_over = False

    def stop(*_: object) -> None:
        if not is_over:
            raise _TooLongError

    before = signal.signal(signal.SIGPROF, stop)
    try:
        # again and again, should somebody catch it
        signal.setitimer(signal.ITIMER_PROF, _SECONDS, _AGAIN_SECONDS)
        yield
        is_over = True
    finally:
        is_over = True
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _with_boxes(response: str) -> str:
    r"""The response with \boxed{ for \fbox{ and \boxed {, which math-verify does not look for."""
    return _BOX.sub(r"\\boxed{", response)


def _is_surely_readable(answer: str) -> bool:
    """Whether an answer is readable without asking math-verify, which takes milliseconds: a number,
    or LaTeX of which math-verify keeps at least the text."""
    if _NUMBER.fullmatch(answer):
        return True
    if not _COMMAND.search(answer):
        return False
    if any(mark in answer for mark in ("$", r"\boxed", r"\text")):
        return False
    depth = 0
    for character in answer:
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth < 0:  # would end the \boxed{...} of _parse_answer
            return False
    return True


@lru_cache(maxsize=1024)  # all responses of a group have the same answer
def _parse_answer(answer: str) -> list[Any]:
    r"""math-verify's forms of an answer, empty if it cannot be read.

    LaTeX that math-verify cannot evaluate (A \cup B) is compared as text. Other text that it cannot
    evaluate is no expression.
    """
    from math_verify import parse

    answer = answer.replace(r"\$", "")  # the sign of a sum of money, and no enclosure
    # math-verify does not recognise bare LaTeX: x^2+1 must be enclosed.
    is_enclosed = "$" in answer or r"\boxed" in answer
    forms = parse(answer if is_enclosed else rf"\boxed{{{answer}}}")
    is_evaluated = any(not isinstance(form, str) for form in forms)
    return forms if is_evaluated or _COMMAND.search(answer) else []
