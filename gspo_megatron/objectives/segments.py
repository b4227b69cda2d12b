"""Sums over the tokens of each sequence, for flat batches and sequences cut over several ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def segment_sum(values: Tensor, sequence_index: Tensor, num_sequences: int) -> Tensor:
    """Sum `values` [..., tokens] by `sequence_index` [tokens] into [..., num_sequences].

    Differentiable. Accumulates and returns float32, or float64 where `values` is float64.
    Sequences without tokens get 0. Indices outside [0, num_sequences) are an error of torch.
    """
    assert sequence_index.dim() == 1, f"sequence_index has shape {tuple(sequence_index.shape)}"
    assert values.shape[-1:] == sequence_index.shape, (
        f"values {tuple(values.shape)} do not end in the tokens of {tuple(sequence_index.shape)}"
    )
    dtype = torch.promote_types(values.dtype, torch.float32)
    sums = values.new_zeros((*values.shape[:-1], num_sequences), dtype=dtype)
    return sums.index_add(-1, sequence_index, values.to(dtype))


def shared_segment_sum(
    values: Tensor,
    sequence_index: Tensor,
    num_sequences: int,
    sum_over_shards: Callable[[Tensor], Tensor],
) -> Tensor:
    """Sum `values` [..., tokens] over whole sequences of which this rank holds a shard.

    The value is the sum over all shards, the same on each of them; the gradient is that of this
    rank's own tokens. Gradients added up over the shards are therefore those of the whole
    sequence, and no collective is needed in the backward pass. `sum_over_shards` gets a detached
    tensor of its own, [..., num_sequences], and may reduce it in place.
    """
    local = segment_sum(values, sequence_index, num_sequences)
    total = sum_over_shards(local.detach().clone())
    # Exactly `total` in value: the bracket is zero, and there to carry the gradient.
    return total + (local - local.detach())
