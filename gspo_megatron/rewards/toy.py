"""A denser reward for the toy tasks, so that a model which is nearly right learns from it."""

from __future__ import annotations

from gspo_megatron.rewards.registry import register
from gspo_megatron.types import Sample


@register("per_character")
def per_character(sample: Sample) -> float:
    """The share of positions at which response and answer hold the same character, in [0, 1].

    Counted over the longer of the two, so that a missing or surplus character costs as much as a
    wrong one and only the exact answer is worth 1.0.
    """
    positions = max(len(sample.answer), len(sample.response))
    if not positions:
        return 1.0
    # zip stops at the shorter one: what is left over counts as wrong.
    right = sum(a == b for a, b in zip(sample.answer, sample.response, strict=False))
    return right / positions
