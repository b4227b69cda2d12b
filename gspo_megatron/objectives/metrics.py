"""Figures of a micro-batch as sums that add up over ranks: the same on every layout. All detached.

A mean is a pair [numerator, denominator] in float64, in which counts stay exact. Figures of whole
sequences are zeros but on the primary shard, figures of tokens are those of the shard's own.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from gspo_megatron.objectives.ratios import MAX_LOG_RATIO, exponentiate
from gspo_megatron.objectives.rules import Clipped
from gspo_megatron.objectives.segments import segment_sum
from gspo_megatron.types import LossInputs

_CLIP_NAMES = ("binding", "outside", "low", "high")


def pair(numerator: Tensor | float, denominator: Tensor | float) -> Tensor:
    """[2] float64 on the device of whichever is a tensor."""
    tensors = [value for value in (numerator, denominator) if isinstance(value, Tensor)]
    device = tensors[0].device if tensors else None
    return torch.stack(
        [
            torch.as_tensor(value, dtype=torch.float64, device=device).detach()
            for value in (numerator, denominator)
        ]
    )


def policy_metrics(inputs: LossInputs, log_ratio: Tensor) -> dict[str, Tensor]:
    """Means over the masked tokens: the entropy if given, and two estimates of KL(old, current).

    With D = log pi - log pi_old of the token, k1 is -D and k3 is exp(D) - 1 - D.
    """
    masked = inputs.mask > 0
    tokens = masked.sum()
    log_ratio = log_ratio.detach()
    k3 = torch.expm1(log_ratio.clamp(max=MAX_LOG_RATIO)) - log_ratio
    means = {"kl/k1": pair(-log_ratio.sum(dtype=torch.float64), tokens)}
    means["kl/k3"] = pair(k3.sum(dtype=torch.float64), tokens)
    if inputs.entropy is not None:
        entropy = inputs.entropy.detach().where(masked, 0.0)
        means["policy/entropy"] = pair(entropy.sum(dtype=torch.float64), tokens)
    return means


def ratio_values(
    inputs: LossInputs, log_ratio: Tensor, sequence_log_ratio: Tensor
) -> dict[str, Tensor]:
    """The ratios themselves, of whatever level the objective works with.

    "ratio/sequence" is the geometric mean of a sequence's token ratios, [num_sequences] on the
    primary shard and empty elsewhere; "ratio/token" is [masked tokens of this shard].
    """
    sequence = exponentiate(sequence_log_ratio.detach())
    return {
        "ratio/sequence": sequence if inputs.is_primary_shard else sequence[:0],
        "ratio/token": exponentiate(log_ratio.detach())[inputs.mask > 0],
    }


def weight_metrics(
    prefix: str, kind: Literal["token", "sequence"], weights: Tensor, inputs: LossInputs
) -> dict[str, Tensor]:
    """Mean of `weights` and of their squares, over the masked tokens or over the sequences that
    have any; and the share that is 0 where the weights are a correction's."""
    weights = weights.detach().double()
    if kind == "token":
        chosen = weights[inputs.mask > 0]
    else:
        chosen = weights[(inputs.sequence_lengths > 0) & inputs.is_primary_shard]
    count = len(chosen)
    means = {
        f"{prefix}/weight": pair(chosen.sum(), count),
        f"{prefix}/squared_weight": pair(chosen.square().sum(), count),
    }
    if prefix == "correction":
        means[f"{prefix}/dropped"] = pair((chosen == 0).sum(), count)
    return means


def share_of_sequences(flags: Tensor, inputs: LossInputs) -> Tensor:
    """[2]: how many sequences have `flags` [num_sequences] and masked tokens, of all that have
    masked tokens."""
    present = (inputs.sequence_lengths > 0) & inputs.is_primary_shard
    return pair((flags & present).sum(), present.sum())


def reference_metrics(inputs: LossInputs) -> dict[str, Tensor]:
    """Means over the masked tokens of the k1 and k3 estimates of KL(pi, reference)."""
    masked = inputs.mask > 0
    difference = (inputs.reference_logprobs - inputs.logprobs.detach()).double()[masked]
    k3 = torch.expm1(difference.clamp(max=MAX_LOG_RATIO)) - difference
    count = len(difference)
    return {
        "kl/reference_k1": pair(-difference.sum(), count),
        "kl/reference_k3": pair(k3.sum(), count),
    }


def sequence_clip_metrics(clipped: Clipped, inputs: LossInputs) -> dict[str, Tensor]:
    """Clip fractions of an objective that clips whole sequences, fields of [num_sequences].

    "clip/sequence/...": share of the sequences that have masked tokens. "clip/token/...": share of
    the masked tokens that are in such sequences, the figure of the GSPO paper. In both
    binding: the clip changes the surrogate and cuts the gradient off, at the lower bound (low) or
    the upper one (high); outside: the ratio is out of the range, whatever the sign of the
    advantage. Sequences with an advantage of 0 are in the denominators and never binding.
    """
    lengths = inputs.sequence_lengths.double() * float(inputs.is_primary_shard)
    present = (lengths > 0).double()
    flags = _flags(clipped).double()
    return {
        **_fractions("clip/sequence", (flags * present).sum(-1), present.sum()),
        **_fractions("clip/token", (flags * lengths).sum(-1), lengths.sum()),
    }


def token_clip_metrics(clipped: Clipped, inputs: LossInputs) -> dict[str, Tensor]:
    """Clip fractions of an objective that clips tokens, fields of [tokens].

    "clip/token/...": share of the masked tokens. "clip/sequence/...": share of the sequences with
    masked tokens in which that is so for one token at least, so that low and high may both count
    for a sequence. The words mean what they mean in `sequence_clip_metrics`.
    """
    masked = inputs.mask > 0
    flags = _flags(clipped) & masked  # [4, tokens]
    counts = segment_sum(flags.float(), inputs.sequence_index, len(inputs.advantages))
    anywhere = _on_any_shard(counts > 0, inputs)
    present = (inputs.sequence_lengths > 0) & inputs.is_primary_shard
    return {
        **_fractions("clip/sequence", (anywhere & present).sum(-1), present.sum()),
        **_fractions("clip/token", flags.double().sum(-1), masked.sum()),
    }


def _on_any_shard(flags: Tensor, inputs: LossInputs) -> Tensor:
    """[4, num_sequences] bool in the order of _CLIP_NAMES: whether a shard of the sequence has the
    flag. Four bytes a sequence travel: the flags are digits to base 256 of one float32, which
    holds three such digits exactly, for up to 255 shards. `binding` is low or high."""
    digits = (
        flags[1:].float() * flags.new_tensor([1.0, 256.0, 65536.0], dtype=torch.float32)[:, None]
    )
    total = inputs.sum_over_shards(digits.sum(0)).long()
    outside, low, high = total % 256 > 0, total // 256 % 256 > 0, total // 65536 > 0
    return torch.stack([low | high, outside, low, high])


def _flags(clipped: Clipped) -> Tensor:
    """[4, ...] bool, in the order of _CLIP_NAMES."""
    return torch.stack([clipped.low | clipped.high, clipped.outside, clipped.low, clipped.high])


def _fractions(prefix: str, numerators: Tensor, denominator: Tensor) -> dict[str, Tensor]:
    return {
        f"{prefix}/{name}": pair(numerator, denominator)
        for name, numerator in zip(_CLIP_NAMES, numerators, strict=True)
    }
