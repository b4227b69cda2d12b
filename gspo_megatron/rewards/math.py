"""Compares mathematical answers by value, with the math-verify package."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from gspo_megatron.errors import RewardError
from gspo_megatron.rewards.math_value import are_small_and_differ, is_too_large, value_text
from gspo_megatron.rewards.registry import register
from gspo_megatron.rewards.values import shorten
from gspo_megatron.types import Sample

_NUMBER = re.compile(r"-?\d+(,\d{3})*(\.\d+)?")
# What math-verify misreads: it takes 1e-7 for e - 7, 2 1/3 for 1, and 10\,000 for 0.
_REWRITTEN: tuple[tuple[re.Pattern[str], Any], ...] = (
    (re.compile(r"\\(?:boxed|fbox)\s*\{"), r"\\boxed{"),
    (re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)[eE]([+-]?\d+)(?!\w|\.\d)"), r"\1 \\cdot 10^{\2}"),
    (re.compile(r"(?<![\w.,/^])(\d+) +([1-9]\d*)/(\d+)(?!\w)"), r"\1\\frac{\2}{\3}"),
    (
        re.compile(r"(?<![\d.])\d{1,3}(?:(?:\\,| )\d{3})+(?!\d)"),
        lambda match: re.sub(r"\\,| ", "", match[0]),
    ),
    (re.compile(r"°|\\degree(?![A-Za-z])"), r"^{\\circ}"),
    (re.compile(r"\\varnothing"), r"\\emptyset"),
)
_COMMAND = re.compile(r"\\(?!boxed|text)[A-Za-z]")
# math-verify computes these while it reads them, so a large one takes too long to read.
_COMPUTED = re.compile(r"binom|gcd|lcm|det|floor|ceil|[Gg]amma|operatorname")
# A longer answer may be too deeply nested, or have more digits than Python converts (4,300).
_MOST_CHARACTERS = 300
_UNREADABLE = "is not a mathematical expression, or is too large to compute"
# Limit of CPU time in seconds for each response, because power towers and factorials may be
# impossible to compute. A limit of wall time, as math-verify has it, would punish right answers on
# a busy machine. The second number is the period at which the error is raised again.
_SECONDS, _AGAIN_SECONDS = 1.0, 0.1


class _TooLongError(BaseException):
    """Raised when the time is over. It is not an Exception, because sympy catches every
    Exception."""


def answer_fault(answer: str) -> str | None:
    """Return why `math` cannot compare responses with an answer, or None. For most answers this is
    fast."""
    if _is_surely_readable(answer) or _parse_answer(answer):
        return None
    return _UNREADABLE


def read_answer(sample: Sample) -> str | None:
    r"""Return the value of the last \boxed{...}, or else of the final expression, as text.

    Equal values give equal text: 1/2, 0.5 and 50\% are the same, and so are x=5 and \frac{10}{2}.
    Returns None if the response has no expression."""
    from math_verify import parse

    response = _rewritten(sample.response)
    try:
        with _limited():
            forms = parse(response[max(response.rfind(r"\boxed"), 0) :])
            return value_text(forms[0]) if forms else None
    except (_TooLongError, ArithmeticError, ValueError, TypeError, RecursionError, MemoryError):
        return None  # the value is too large or takes too long


@register(
    "math",
    answers=(str, int, float),
    requires="math-verify",
    answer_fault=answer_fault,
    workers=1,  # math-verify has hung on malformed LaTeX, and the time limit needs a main thread
    read_answer=read_answer,
)
def math(sample: Sample) -> float:
    r"""Return 1.0 if the response's final expression equals the answer, else 0.0.

    math-verify finds the expression (\boxed{...} first, then other LaTeX, then plain numbers) and
    compares by value: 1/2, 0.5 and \frac{1}{2} are the same. A response with several \boxed{...} is
    right if the last box has the answer, or if the contents of all boxes together are the answer (a
    set). The answer may be plain text, or LaTeX with or without $...$ or \boxed{...}. A response
    scores 0.0 if it has no expression, or if its value takes more than a second to compute.

    Raises RewardError if the answer is not a mathematical expression, or is too large to compute.
    """
    from math_verify import parse

    text = str(sample.answer)
    answer: list[Any] = _parse_answer(text)
    if not answer and _is_surely_readable(text):
        answer = [text]  # no check before the run has refused it, so it must not end the run
    if not answer:
        raise RewardError(
            f"reward 'math': the answer {shorten(sample.answer)} of prompt {sample.prompt!r} "
            f"{_UNREADABLE}"
        )
    response = _rewritten(sample.response)
    last_box = response.rfind(r"\boxed")
    texts = [response[last_box:], response] if last_box > 0 else [response]
    try:
        with _limited():
            return float(any(_is_equal(answer, parse(each)) for each in texts))
    except _TooLongError:
        return 0.0


def _is_equal(answer: list[Any], response: list[Any]) -> bool:
    """Whether a form of the answer equals a form of the response, as math-verify parsed them."""
    from math_verify import verify

    forms = _computable(response)
    return verify(answer, forms) and not are_small_and_differ(answer[0], forms[0])


def _computable(forms: list[Any]) -> list[Any]:
    """Return math-verify's forms of an expression without those that are too large to compute; the
    text is left."""
    return [form for form in forms if isinstance(form, str) or not is_too_large(form)]


@contextmanager
def _limited() -> Generator[None]:
    """Raise _TooLongError after `_SECONDS` of CPU time.

    This works only in the main thread. Other threads get no signals, and math-verify refuses to run
    there."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    is_over = False

    def stop(*_: object) -> None:
        if not is_over:
            raise _TooLongError

    before = signal.signal(signal.SIGPROF, stop)
    try:
        # The timer repeats, because a library may catch the first error.
        signal.setitimer(signal.ITIMER_PROF, _SECONDS, _AGAIN_SECONDS)
        yield
        is_over = True
    finally:
        is_over = True
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _rewritten(text: str) -> str:
    for pattern, replacement in _REWRITTEN:
        text = pattern.sub(replacement, text)
    return text


def _is_surely_readable(answer: str) -> bool:
    r"""Whether math-verify can surely read an answer: a number, or LaTeX.

    This check is faster than math-verify, which takes milliseconds. For LaTeX that passes this
    check, math-verify returns at least the text, except for commands that mean nothing to it, such
    as \ldots alone."""
    if len(answer) > _MOST_CHARACTERS:
        return False
    if _NUMBER.fullmatch(answer):
        return True
    if not _COMMAND.search(answer) or _COMPUTED.search(answer):
        return False
    if any(mark in answer for mark in ("$", r"\boxed", r"\text")):
        return False
    depth = 0
    for character in answer:
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth < 0:  # this brace would close the \boxed{...} that _parse_answer adds
            return False
    return True


@lru_cache(maxsize=1024)  # all responses in a group have the same answer
def _parse_answer(answer: str) -> list[Any]:
    r"""Return the forms to which math-verify parses an answer. Returns an empty list if it cannot
    read the answer.

    LaTeX that math-verify cannot evaluate (A \cup B) is compared as text. If an answer has no
    LaTeX and math-verify cannot evaluate it, the answer is not an expression.
    """
    from math_verify import parse

    answer = _rewritten(answer).replace(r"\$", "")  # a dollar sign, not a LaTeX delimiter
    # math-verify does not recognise bare LaTeX, so x^2+1 must be inside \boxed{...}.
    is_enclosed = "$" in answer or r"\boxed" in answer
    forms = parse(answer if is_enclosed else rf"\boxed{{{answer}}}")
    is_evaluated = any(not isinstance(form, str) for form in forms)
    return forms if is_evaluated or _COMMAND.search(answer) else []
