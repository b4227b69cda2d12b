"""A dense reward for the toy tasks: a nearly right answer gets almost the full reward."""

from __future__ import annotations

from gspo_megatron.rewards.registry import register
from gspo_megatron.types import Sample


@register("per_character")
def per_character(sample: Sample) -> float:
    """Return the share of positions with the same character in response and answer, in [0, 1].

    The number of positions is the length of the longer text. So a missing or surplus character
    counts as wrong, and only the exact answer scores 1.0.
    """
    positions = max(len(sample.answer), len(sample.response))
    if not positions:
        return 1.0
    # zip stops at the end of the shorter text, and the remaining characters count as wrong.
    right = sum(a == b for a, b in zip(sample.answer, sample.response, strict=False))
    return right / positions
