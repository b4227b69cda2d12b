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


def sequence_mean(terms: Tensor, inputs: LossInputs) -> tuple[Tensor, Tensor]:
    """-(1/N) sum_i terms_i for `terms` [num_sequences] that are the same on every shard.

    A sequence without masked tokens counts in N and adds nothing.
    """
    assert terms.shape == inputs.advantages.shape, f"terms {tuple(terms.shape)}"
    total = terms.where(inputs.sequence_lengths > 0, 0.0).sum()
    # All shards hold the same value: only one of them may report it.
    numerator = -total if inputs.is_primary_shard else total.new_zeros(())
    return -total / inputs.global_num_sequences, pair(numerator, _num_sequences(inputs))


def sequence_mean_of_token_mean(terms: Tensor, inputs: LossInputs) -> tuple[Tensor, Tensor]:
    """-(1/N) sum_i (1/|y_i|) sum_t terms_it for this shard's `terms` [tokens].

    |y_i| is the length of the whole sequence, so the parts of its shards add up to its mean.
    """
    assert terms.shape == inputs.mask.shape, f"terms {tuple(terms.shape)}"
    lengths = inputs.sequence_lengths.clamp_min(1)[inputs.sequence_index]
    total = (terms / lengths).where(inputs.mask > 0, 0.0).sum()
    return -total / inputs.global_num_sequences, pair(-total, _num_sequences(inputs))


def _num_sequences(inputs: LossInputs) -> int:
    return len(inputs.advantages) if inputs.is_primary_shard else 0
