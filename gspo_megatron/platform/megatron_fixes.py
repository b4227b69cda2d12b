"""Defects of stock Megatron-Core that training here would meet, mended in one place.

Each has a test that fails when an upgrade makes the mending superfluous.
"""

from __future__ import annotations

import functools
from typing import Any

import torch


def install() -> None:
    """Apply all of them; once, before a model is built."""
    _count_no_tokens_as_one()


def _count_no_tokens_as_one() -> None:
    """A micro-batch of padding alone has no token by the padding mask, and the aux loss divides by
    their number squared: 0 / 0 would make every gradient NaN. Data-parallel ranks with fewer
    sequences than micro-batches run such micro-batches to take part in the collectives."""
    from megatron.core.transformer.moe import router

    native = router.get_tokens_per_expert_and_token_count

    @functools.wraps(native)
    def counted(*args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
        per_expert, local, total = native(*args, **kwargs)
        return per_expert, local, total.clamp(min=1) if torch.is_tensor(total) else total

    router.get_tokens_per_expert_and_token_count = counted
