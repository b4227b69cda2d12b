"""What is done with a ratio far from 1. Shapes are free: tokens and sequences alike."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gspo_megatron.objectives.ratios import exponentiate


@dataclass(frozen=True)
class Clipped:
    """A surrogate, which carries the gradient, and what the rule did; all of the ratio's shape."""

    surrogate: Tensor
    low: Tensor  # bool: the lower bound binds, that is, it cuts the gradient off
    high: Tensor  # bool: the upper bound binds
    outside: Tensor  # bool: the ratio is out of the range, whether that changes anything or not


def min_clip(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Clipped:
    """min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A), the pessimistic clip of PPO.

    The upper bound binds for positive advantages only, the lower one for negative ones only, and
    neither for an advantage of 0.
    """
    _check_shapes(ratio, advantages)
    lower, upper = 1.0 - clip_low, 1.0 + clip_high
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(lower, upper) * advantages)
    below, above = ratio.detach() < lower, ratio.detach() > upper
    return Clipped(
        surrogate=surrogate,
        low=below & (advantages < 0),
        high=above & (advantages > 0),
        outside=below | above,
    )


def dual_clip(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float
) -> Clipped:
    """`min_clip`, and for negative advantages never less than dual_clip * A (arXiv 1912.09729).

    Without it one token that the new policy likes far better, with a negative advantage, outweighs
    the batch. `high` counts where this bound binds too, and `outside` what is beyond it.
    """
    inner = min_clip(ratio, advantages, clip_low, clip_high)
    bounded = torch.maximum(inner.surrogate, dual_clip * advantages)
    negative = advantages < 0
    beyond = negative & (ratio.detach() > dual_clip)
    return Clipped(
        surrogate=bounded.where(negative, inner.surrogate),
        low=inner.low,
        high=inner.high | beyond,
        outside=inner.outside | beyond,
    )


def capped(ratio: Tensor, advantages: Tensor, logprobs: Tensor, clip_high: float) -> Clipped:
    """sg[min(ratio, 1 + clip_high)] A log pi (CISPO, arXiv 2506.13585, eqs. 4-5).

    The weight is cut and the gradient is not: every token keeps learning. `high` says where the cut
    changes the loss, which it does for advantages of both signs.
    """
    _check_shapes(ratio, advantages)
    above = ratio.detach() > 1.0 + clip_high
    weights = ratio.detach().clamp(max=1.0 + clip_high)
    surrogate = weights * advantages * logprobs
    return Clipped(surrogate, torch.zeros_like(above), above & (advantages != 0), above)


def soft_gate(
    ratio: Tensor, advantages: Tensor, tau_positive: float, tau_negative: float
) -> Clipped:
    """(4 / tau) sigmoid(tau (ratio - 1)) A (SAPO, arXiv 2511.20347): its slope at ratio 1 is 1 and
    falls off to both sides, faster with a larger tau. Nothing is clipped."""
    _check_shapes(ratio, advantages)
    positive, negative = ratio.new_tensor(tau_positive), ratio.new_tensor(tau_negative)
    tau = torch.where(advantages > 0, positive, negative)
    nothing = torch.zeros_like(advantages, dtype=torch.bool)
    surrogate = torch.sigmoid(tau * (ratio - 1.0)) * (4.0 / tau) * advantages
    return Clipped(surrogate, nothing, nothing, nothing)


def masked(
    ratio: Tensor,
    advantages: Tensor,
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    clip_low: float,
    clip_high: float,
) -> Clipped:
    """M sg[pi / mu] A log pi with M = 0 where `min_clip` would bind (MiniRL, arXiv 2512.01374).

    The mask looks at the trainer's ratio pi / pi_old, the weight at what really sampled, mu.
    """
    bounds = min_clip(ratio.detach(), advantages, clip_low, clip_high)
    weights = exponentiate(logprobs.detach() - rollout_logprobs)
    kept = weights * advantages * logprobs
    return Clipped(
        kept.where(~(bounds.low | bounds.high), 0.0), bounds.low, bounds.high, bounds.outside
    )


def clip_log_ratio(log_ratio: Tensor, advantages: Tensor, log_clip: float) -> Clipped:
    """Token log-ratios limited, on the side that the advantage rewards, to +-log_clip (GMPO, arXiv
    2507.20673, eq. 4). `surrogate` are the limited log-ratios, for a geometric mean."""
    _check_shapes(log_ratio, advantages)
    high = (log_ratio.detach() > log_clip) & (advantages > 0)
    low = (log_ratio.detach() < -log_clip) & (advantages < 0)
    limited = log_ratio.where(~high, log_clip).where(~low, -log_clip)
    return Clipped(limited, low, high, log_ratio.detach().abs() > log_clip)


def _check_shapes(ratio: Tensor, advantages: Tensor) -> None:
    assert ratio.shape == advantages.shape, (
        f"ratio {tuple(ratio.shape)} and advantages {tuple(advantages.shape)} would broadcast"
    )
