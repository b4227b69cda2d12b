"""From the terms of a surrogate to one loss, with the global counts as denominators.

Each function returns the loss, to be minimised, and the [numerator, denominator] pair of its mean:
summed over all ranks and micro-batches of the mini-batch, the first over the second is the value of
the objective's loss. The value of the loss on one rank alone means little: it may be the same on
all shards of a sequence, or a part.
"""

from __future__ import annotations

from torch import Tensor

from gspo_megatron.objectives.metrics import pair
from gspo_megatron.types import LossInputs


def aggregate_sequences(
    terms: Tensor, inputs: LossInputs, aggregation: str
) -> tuple[Tensor, Tensor]:
    """`terms` [num_sequences], the same on every shard.

    sequence_mean: -(1/N) sum_i terms_i; token_sum: -(1/N) sum_i |y_i| terms_i (LUSPO). A sequence
    without masked tokens counts in N and adds nothing.
    """
    assert terms.shape == inputs.advantages.shape, f"terms {tuple(terms.shape)}"
    assert aggregation in ("sequence_mean", "token_sum"), aggregation
    if aggregation == "token_sum":
        terms = terms * inputs.sequence_lengths
    total = terms.where(inputs.sequence_lengths > 0, 0.0).sum()
    # All shards hold the same value: only one of them may report it.
    numerator = -total if inputs.is_primary_shard else total.new_zeros(())
    return -total / inputs.global_num_sequences, pair(numerator, _num_sequences(inputs))


def aggregate_tokens(
    terms: Tensor, inputs: LossInputs, aggregation: str, max_response_tokens: int
) -> tuple[Tensor, Tensor]:
    """This shard's `terms` [tokens], with N sequences in the mini-batch and T tokens.

    sequence_mean: -(1/N) sum_i (1/|y_i|) sum_t terms_it, with the length of the whole sequence, so
    that the parts of its shards add up to its mean; token_mean: -(1/T) sum_it terms_it; token_sum:
    -(1/N) sum_it terms_it; constant_length: that over max_response_tokens (Dr. GRPO).
    """
    assert terms.shape == inputs.mask.shape, f"terms {tuple(terms.shape)}"
    if aggregation == "sequence_mean":
        terms = terms / inputs.sequence_lengths.clamp_min(1)[inputs.sequence_index]
    total = terms.where(inputs.mask > 0, 0.0).sum()
    if aggregation == "token_mean":
        # a mini-batch whose responses are all masked has a loss of 0, not of 0/0
        return -total / max(inputs.global_num_tokens, 1), pair(-total, (inputs.mask > 0).sum())
    if aggregation == "constant_length":
        total = total / max_response_tokens
    else:
        assert aggregation in ("sequence_mean", "token_sum"), aggregation
    return -total / inputs.global_num_sequences, pair(-total, _num_sequences(inputs))


def _num_sequences(inputs: LossInputs) -> int:
    return len(inputs.advantages) if inputs.is_primary_shard else 0
