"""The reward `exact_match`, 1 for the exact answer and 0 otherwise; and `none`, always 0."""

from __future__ import annotations

from gspo_megatron.rewards.registry import register
from gspo_megatron.types import Sample


def read_answer(sample: Sample, strip: bool = True, ignore_case: bool = False) -> str:
    """Return the response. `strip` removes white space around it; `ignore_case` turns it into lower
    case."""
    return _normal(sample.response, strip, ignore_case)


@register("exact_match", read_answer=read_answer)
def exact_match(sample: Sample, strip: bool = True, ignore_case: bool = False) -> float:
    """Return 1.0 if the response is the answer, else 0.0.

    `strip` ignores white space around the response and the answer; `ignore_case` ignores upper and
    lower case.
    """
    response, answer = (_normal(t, strip, ignore_case) for t in (sample.response, sample.answer))
    return float(response == answer)


def _normal(text: str, strip: bool, ignore_case: bool) -> str:
    text = text.strip() if strip else text
    return text.casefold() if ignore_case else text


@register("none", answers=None)
def none(sample: Sample) -> float:
    """Return 0.0 for every response. The policy then learns only from objective.distillation."""
    return 0.0
