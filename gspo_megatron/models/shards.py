"""The place of each local parameter in the full tensors of the model, which a rank may hold only in
part.

Initialisation, parity tests and HF conversion all use this one map between a rank's parameters and
the layout-independent model. It reads Megatron-Core's own sharded_state_dict.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.transformer.module import MegatronModule
from torch import Tensor


@dataclass(frozen=True)
class Shard:
    """A local view into a parameter, and where it lies in the global tensor called `name`."""

    name: str
    parameter: torch.nn.Parameter
    data: Tensor  # a view: writing to it writes to the parameter
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        """Where the shard lies in the global tensor. A shard may reach beyond the global tensor,
        into padding."""
        return tuple(
            slice(start, start + size)
            for start, size in zip(self.offset, self.data.shape, strict=True)
        )

    def view(self, like_parameter: Tensor) -> Tensor:
        """This shard's piece of another tensor with the parameter's shape, such as the gradient."""
        assert like_parameter.shape == self.parameter.shape and like_parameter.is_contiguous()
        start = self.data.storage_offset() - self.parameter.storage_offset()
        return like_parameter.as_strided(
            self.data.shape, self.data.stride(), like_parameter.storage_offset() + start
        )


def parameter_shards(model: MegatronModule) -> Iterator[Shard]:
    """All parameters of one (unwrapped) model chunk on this rank, each expert by itself."""
    parameters = {p.data_ptr(): p for p in model.parameters()}
    for entry in model.sharded_state_dict(metadata={"non_homogeneous_layers": True}).values():
        if not isinstance(entry, ShardedTensor | ShardedTensorFactory):
            continue  # Transformer Engine's extra state
        # On the meta device all tensors have the same data_ptr, so an entry that is a parameter is
        # not looked up.
        is_parameter = isinstance(entry.data, torch.nn.Parameter)
        parameter = entry.data if is_parameter else parameters.get(entry.data.data_ptr())
        if parameter is None:
            continue  # buffers, such as the expert bias
        pieces = entry.build() if isinstance(entry, ShardedTensorFactory) else [entry]
        for piece in pieces:
            yield from _shards(piece, parameter)


def _shards(piece: ShardedTensor, parameter: torch.nn.Parameter) -> Iterator[Shard]:
    """The shards of one piece. Axes that number layers or experts become part of the name."""
    data = piece.data.detach()
    prepended = piece.prepend_axis_num
    name = piece.key + "".join(f"[{index}]" for index in piece.global_offset[:prepended])
    shape, offset = tuple(piece.global_shape[prepended:]), tuple(piece.global_offset[prepended:])
    whole = Shard(name, parameter, data, shape, offset)
    if data.dim() < 3 or ".experts." not in name:
        yield whole
        return
    for index in range(data.shape[0]):
        yield replace(
            whole,
            name=f"{name}[{offset[0] + index}]",
            data=data[index],
            global_shape=shape[1:],
            offset=offset[1:],
        )
