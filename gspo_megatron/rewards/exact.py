"""The reward `exact_match`, 1 for the exact answer and 0 otherwise; and `none`, always 0."""

from __future__ import annotations

from gspo_megatron.rewards.registry import register
from gspo_megatron.types import Sample


def read_answer(sample: Sample, strip: bool = True, ignore_case: bool = False) -> str:
    """Return the response. `strip` removes white space around it; `ignore_case` turns it into lower
    case."""
    response = sample.response.strip() if strip else sample.response
    return response.casefold() if ignore_case else response


@register("exact_match", read_answer=read_answer)
def exact_match(sample: Sample, strip: bool = True, ignore_case: bool = False) -> float:
    """Return 1.0 if the response is the answer, else 0.0.

    `strip` ignores white space around the response and the answer; `ignore_case` ignores upper and
    lower case.
    """
    response, answer = sample.response, sample.answer
    if strip:
        response, answer = response.strip(), answer.strip()
    if ignore_case:
        response, answer = response.casefold(), answer.casefold()
    return float(response == answer)


@register("none", answers=None)
def none(sample: Sample) -> float:
    """Return 0.0 for every response. The policy then learns only from objective.distillation."""
    return 0.0
