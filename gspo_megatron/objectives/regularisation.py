"""Terms beside the surrogate: divergence from a reference policy, and entropy."""

from __future__ import annotations

import torch
from torch import Tensor

from gspo_megatron.objectives.ratios import MAX_LOG_RATIO
from gspo_megatron.types import LossInputs


def divergence(estimator: str, logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Estimates of KL(pi, reference) from tokens sampled by pi, of any shape, with gradient.

    With d = log reference - log pi: k1 = -d, unbiased and of both signs; k2 = d^2 / 2; k3 = e^d - 1
    - d, unbiased and never negative (http://joschu.net/blog/kl-approx.html). As a term of the loss
    the gradient of k2 is that of the divergence; that of k1 is zero in expectation.
    """
    difference = reference_logprobs - logprobs
    if estimator == "k1":
        return -difference
    if estimator == "k2":
        return 0.5 * difference.square()
    assert estimator == "k3", estimator
    return torch.expm1(difference.clamp(max=MAX_LOG_RATIO)) - difference


def mean_entropy(inputs: LossInputs) -> Tensor:
    """This shard's part of the mean entropy of the mini-batch's response tokens, with gradient."""
    assert inputs.entropy is not None
    total = inputs.entropy.where(inputs.mask > 0, 0.0).sum()
    return total / max(inputs.global_num_tokens, 1)
