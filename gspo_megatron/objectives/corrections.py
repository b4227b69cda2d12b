"""Weights for responses that another engine sampled than the one that computes the gradient.

Let k be the ratio pi_old / mu: the old policy as the trainer evaluates it over the policy as the
rollout engine did. Weights are detached and multiply the surrogate's terms. Those of a sequence are
of its geometric mean, like the ratio of GSPO; a product over hundreds of tokens is another thing,
and is called so.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gspo_megatron.objectives.ratios import exponentiate
from gspo_megatron.types import LossInputs


def log_mismatch(inputs: LossInputs) -> Tensor:
    """log pi_old - log mu, [tokens]; 0 outside the mask."""
    assert inputs.rollout_logprobs is not None, "a correction needs the rollout's log-probs"
    difference = inputs.old_logprobs - inputs.rollout_logprobs
    return difference.where(inputs.mask > 0, 0.0)


def summed_over_sequences(correction: str, mismatch: Tensor) -> Tensor | None:
    """[tokens] of which `sequence_weights` wants the sums over sequences; None where nothing."""
    if correction == "k3_mask":
        return torch.expm1(mismatch.clamp(max=40.0)) - mismatch
    return mismatch if correction.startswith("sequence_") else None


def token_weights(
    correction: str, mismatch: Tensor, correction_high: float, correction_low: float = 0.0
) -> Tensor:
    """[tokens]. token_tis: min(k, high), truncated importance sampling. icepop: k where low <= k <=
    high, else 0 (IcePop of Ring-1T, arXiv 2510.18855)."""
    ratio = exponentiate(mismatch)
    if correction == "token_tis":
        return ratio.clamp(max=correction_high)
    assert correction == "icepop", correction
    return ratio.where((ratio >= correction_low) & (ratio <= correction_high), 0.0)


def sequence_weights(
    correction: str,
    sums: Tensor,
    lengths: Tensor,
    correction_high: float,
    correction_low: float = 0.0,
) -> Tensor:
    """[num_sequences] from `sums` of `summed_over_sequences` over whole sequences.

    With g the geometric mean of k over the sequence: sequence_tis: min(g, high); sequence_mask: 1
    where low <= g <= high, else 0. sequence_product_tis: min(product of k, high). k3_mask: 1 where
    the mean of k - 1 - log k is at most high, else 0.
    """
    if correction == "sequence_product_tis":
        return exponentiate(sums).clamp(max=correction_high)
    means = sums / lengths.clamp_min(1)
    if correction == "k3_mask":
        return (means <= correction_high).to(sums.dtype)
    ratio = exponentiate(means)
    if correction == "sequence_tis":
        return ratio.clamp(max=correction_high)
    assert correction == "sequence_mask", correction
    return ((ratio >= correction_low) & (ratio <= correction_high)).to(sums.dtype)


def kept_by_off_policy_mask(log_ratio_means: Tensor, advantages: Tensor, bound: float) -> Tensor:
    """[num_sequences] bool: not those with a negative advantage that the policy has left, by a mean
    of log(pi_old / pi) beyond `bound` (off-policy sequence masking, arXiv 2512.02556)."""
    return (advantages >= 0) | (-log_ratio_means.detach() <= bound)
