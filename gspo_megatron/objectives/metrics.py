"""Metrics of a micro-batch, as sums. Added up over the ranks, they have the same value on every
layout. All metrics are detached.

A mean is a pair [numerator, denominator] in float64, in which counts stay exact. Metrics of whole
sequences are zero on all shards except the primary one. Metrics of tokens are sums over the shard's
own tokens.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from gspo_megatron.objectives.parts import Clipped, exponentiate, k3, segment_sum
from gspo_megatron.types import LossInputs


def pair(numerator: Tensor, denominator: Tensor | float) -> Tensor:
    """Return [numerator, denominator]: [2] float64 on the device of `numerator`, detached."""
    if not isinstance(denominator, Tensor):  # full_like does not make the host wait for the GPU
        denominator = torch.full_like(numerator, denominator, dtype=torch.float64)
    return torch.stack([numerator.detach().double(), denominator.double()])


def policy_metrics(inputs: LossInputs, log_ratio: Tensor) -> dict[str, Tensor]:
    """Means over the tokens in the mask: two estimates of KL(old, current); the entropy, if the
    inputs have it; and two estimates of KL(current, reference), if there is a reference.

    With D = log p - log q of a token sampled from q, k1 is -D and k3 is exp(D) - 1 - D.
    """
    masked = inputs.mask > 0
    differences = {"kl/": log_ratio.detach()}
    if inputs.reference_logprobs is not None:
        reference = inputs.reference_logprobs - inputs.logprobs.detach()
        differences["kl/reference_"] = reference.double()
    means = {}
    for prefix, difference in differences.items():
        means[f"{prefix}k1"] = _mean(-difference, masked)
        means[f"{prefix}k3"] = _mean(k3(difference), masked)
    if inputs.entropy is not None:
        means["policy/entropy"] = _mean(inputs.entropy, masked)
    return means


def _mean(values: Tensor, chosen: Tensor) -> Tensor:
    """The pair of the mean of `values` over the elements at which `chosen` is set. Both tensors are
    [tokens], or both are [num_sequences]."""
    return pair(values.detach().double().where(chosen, 0.0).sum(), chosen.sum())


def ratio_values(
    inputs: LossInputs, log_ratio: Tensor, sequence_log_ratio: Tensor
) -> dict[str, Tensor]:
    """The ratios of sequences and of tokens. Both are returned, even if the objective uses only one
    of them.

    "ratio/sequence" is the geometric mean of a sequence's token ratios, [num_sequences] on the
    primary shard and empty elsewhere, and NaN for a sequence without tokens in the mask. Selecting
    the other sequences here would make the host wait for the device. "ratio/token" is [tokens of
    this shard in the mask].
    """
    sequence = exponentiate(sequence_log_ratio.detach())
    sequence = sequence.masked_fill(inputs.sequence_lengths <= 0, math.nan)
    return {
        "ratio/sequence": sequence if inputs.is_primary_shard else sequence[:0],
        "ratio/token": exponentiate(log_ratio.detach())[inputs.mask > 0],
    }


def weight_metrics(
    prefix: str, level: Literal["token", "sequence"], weights: Tensor, inputs: LossInputs
) -> dict[str, Tensor]:
    """The mean of `weights` and of their squares, over the tokens in the mask or over the sequences
    with tokens in the mask. For weights of a correction, also the share of weights that are 0."""
    chosen = inputs.mask > 0 if level == "token" else _present(inputs)
    weights = weights.detach().double()
    means = {
        f"{prefix}/weight": _mean(weights, chosen),
        f"{prefix}/squared_weight": _mean(weights.square(), chosen),
    }
    if prefix.startswith("correction"):
        means[f"{prefix}/dropped"] = _mean(weights == 0, chosen)
    return means


def share_of_sequences(flags: Tensor, inputs: LossInputs) -> Tensor:
    """The share of sequences whose flag in `flags` [num_sequences] is set, as a pair. Only
    sequences with tokens in the mask count."""
    return _mean(flags, _present(inputs))


def clip_metrics(
    clipped: Clipped, level: Literal["token", "sequence"], inputs: LossInputs
) -> dict[str, Tensor]:
    """Clip fractions of an objective that clips whole sequences or single tokens (`level`); fields
    of `clipped` are [num_sequences] or [tokens].

    "clip/sequence/...": the share of clipped sequences among those with tokens in the mask. A
    sequence of which at least one token is clipped is a clipped sequence. So it may count in low
    and in high.
    "clip/token/...": the share of clipped tokens among the tokens in the mask. All tokens of a
    clipped sequence count, as the GSPO paper counts.
    Both shares are measured in two ways. Binding: the clip changes the surrogate and cuts the
    gradient off, at the lower bound (low) or at the upper bound (high). Outside: the ratio is out
    of the range, for any sign of the advantage. Sequences with an advantage of 0 count in the
    denominators, but a clip of them is never binding.
    """
    sequences = tokens = torch.stack([clipped.outside, clipped.low, clipped.high])
    counted = inputs.sequence_lengths.double() * inputs.is_primary_shard
    if level == "token":
        counted = inputs.mask > 0
        tokens = tokens & counted  # [3, tokens]
        # for each sequence, how many of its tokens on all shards have each flag: 12 bytes
        counts = segment_sum(tokens.float(), inputs.sequence_index, len(inputs.advantages))
        sequences = inputs.sum_over_shards(counts) > 0  # [3, num_sequences]
    shares = _fractions("clip/sequence", sequences, _present(inputs))
    return shares | _fractions("clip/token", tokens, counted)


def _fractions(prefix: str, flags: Tensor, counted: Tensor) -> dict[str, Tensor]:
    """The shares of the flags outside, low and high ([3, n]), weighted by `counted` [n]."""
    outside, low, high = flags
    named = {"binding": low | high, "outside": outside, "low": low, "high": high}
    return {
        f"{prefix}/{key}": pair((each * counted).sum(), counted.sum())
        for key, each in named.items()
    }


def _present(inputs: LossInputs) -> Tensor:
    """Return [num_sequences] bool: whether a sequence has tokens in the mask and is counted on this
    shard."""
    return (inputs.sequence_lengths > 0) & inputs.is_primary_shard
