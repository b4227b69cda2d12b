"""What is done with a ratio far from 1. Shapes are free: tokens and sequences alike."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Clipped:
    """A surrogate, which carries the gradient, and what the clip did; all of the ratio's shape."""

    surrogate: Tensor
    low: Tensor  # bool: the lower bound binds, that is, it cuts the gradient off
    high: Tensor  # bool: the upper bound binds
    outside: Tensor  # bool: the ratio is out of the range, whether that changes anything or not


def min_clip(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Clipped:
    """min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A), the pessimistic clip of PPO.

    The upper bound binds for positive advantages only, the lower one for negative ones only, and
    neither for an advantage of 0.
    """
    assert ratio.shape == advantages.shape, (
        f"ratio {tuple(ratio.shape)} and advantages {tuple(advantages.shape)} would broadcast"
    )
    lower, upper = 1.0 - clip_low, 1.0 + clip_high
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(lower, upper) * advantages)
    below, above = ratio.detach() < lower, ratio.detach() > upper
    return Clipped(
        surrogate=surrogate,
        low=below & (advantages < 0),
        high=above & (advantages > 0),
        outside=below | above,
    )
