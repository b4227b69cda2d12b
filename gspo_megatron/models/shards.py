"""Every parameter as a piece of a tensor that exists whole only in thought.

The one map between a rank's parameters and the layout-independent model: initialisation, parity
tests and conversion all go through it. It reads Megatron-Core's own sharded_state_dict.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor


@dataclass(frozen=True)
class Shard:
    """A local view into a parameter, and where it lies in the global tensor called `name`."""

    name: str
    data: Tensor  # a view: writing to it writes to the parameter
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        """What this shard is of the global tensor; a shard may end in padding beyond it."""
        return tuple(
            slice(start, start + size)
            for start, size in zip(self.offset, self.data.shape, strict=True)
        )


def parameter_shards(model: torch.nn.Module) -> Iterator[Shard]:
    """All parameters of one (unwrapped) model chunk on this rank, stacks of experts one by one."""
    parameters = {id(p.data): p for p in model.parameters()}
    storages = {p.untyped_storage().data_ptr() for p in model.parameters()}
    assert parameters
    for entry in model.sharded_state_dict(metadata={"non_homogeneous_layers": True}).values():
        pieces = entry.build() if isinstance(entry, ShardedTensorFactory) else [entry]
        for piece in pieces:
            if not isinstance(piece, ShardedTensor) or piece.data is None:
                continue  # Transformer Engine's extra state
            if piece.data.untyped_storage().data_ptr() not in storages:
                continue  # buffers, such as the expert bias
            yield from _shards(piece)


def _shards(piece: ShardedTensor) -> Iterator[Shard]:
    """Axes that number layers or experts become part of the name."""
    data = piece.data.detach()
    prepended = piece.prepend_axis_num
    name = piece.key + "".join(f"[{index}]" for index in piece.global_offset[:prepended])
    shape, offset = piece.global_shape[prepended:], piece.global_offset[prepended:]
    if data.dim() < 3:
        yield Shard(name, data, tuple(shape), tuple(offset))
        return
    for index in range(data.shape[0]):
        expert = f"{name}[{offset[0] + index}]"
        yield Shard(expert, data[index], tuple(shape[1:]), tuple(offset[1:]))
