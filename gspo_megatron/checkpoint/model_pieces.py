"""Lists the tensors of the model on this rank as boxes (rectangular parts) of global tensors. The
global tensors do not depend on the layout.

Megatron-Core's sharded_state_dict says where each tensor belongs. This module adds the boxes of any
range of a flat parameter, for the distributed optimizer, and the scales of FP8 matrix products.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.core.fp8_utils import get_fp8_recipe
from torch import Tensor

from gspo_megatron.checkpoint.storage import Piece
from gspo_megatron.families.adapter_map import is_adapter
from gspo_megatron.families.weight_map import is_one_matrix, is_vocabulary, native_name
from gspo_megatron.models.build import Policy

_EXTRA_STATE = "_extra_state"
_DIRECTIONS = {"fwd": "scaling_fwd", "bwd": "scaling_bwd"}
_TENSORS = ("scale", "amax_history")
_LINEAR = {"Linear", "LayerNormLinear", "GroupedLinear"}


@dataclass(frozen=True)
class ModelPiece:
    """Consecutive elements of a parameter or buffer that form a box of the global tensor."""

    key: str
    tensor: Tensor  # the parameter or buffer
    start: int  # first element in the flat parameter
    # Shape of the box, without vocabulary padding; it has as many axes as global_shape.
    shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    replica: tuple[int, ...]  # Megatron-Core's replica_id; its last number is the DP rank

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.shape)

    @property
    def is_original(self) -> bool:
        """True on exactly one of the tensor- and pipeline-parallel ranks that hold a copy."""
        return not any(self.replica[:-1])

    def whole(self) -> Piece:
        return next(self.range_of(self.tensor.detach().view(-1), 0, self.key))

    def range_of(self, flat: Tensor, first: int, key: str) -> Iterator[Piece]:
        """Yield views of `flat` [n] as pieces of the global tensor `key`. `flat` has the values for
        the elements first to first + n of the flat parameter."""
        start, stop = max(self.start, first), min(self.stop, first + flat.numel())
        for offset, size in boxes(self.shape, start - self.start, stop - self.start):
            data = flat[start - first : start - first + math.prod(size)].view(size)
            place = tuple(a + b for a, b in zip(self.offset, offset, strict=True))
            yield Piece(key, data, self.global_shape, place)
            start += math.prod(size)


def model_pieces(policy: Policy, *, adapters: bool = True) -> list[ModelPiece]:
    """List the parameters and buffers of this rank's model chunks that belong in a checkpoint. If
    the policy has adapters, list only the adapters, or with adapters=False all other parameters and
    buffers."""
    found: list[ModelPiece] = []
    adapters = adapters and policy.lora is not None
    for model in policy.models:
        # This call comes first because it converts the routers' biases back to float32. A bf16
        # model holds them in bf16.
        entries = model.sharded_state_dict(metadata={"non_homogeneous_layers": True})
        own = {t.data_ptr(): t for t in [*model.buffers(), *model.parameters()]}
        covered: dict[int, int] = dict.fromkeys((p.data_ptr() for p in model.parameters()), 0)
        for entry in entries.values():
            if not isinstance(entry, ShardedTensor | ShardedTensorFactory):
                continue  # Transformer Engine's extra state: FP8 scales, see scale_pieces
            if is_adapter(entry.key) != adapters:
                continue
            tensor = own[entry.data.data_ptr()]
            built = entry.build() if isinstance(entry, ShardedTensorFactory) else [entry]
            parts = list(nested_values(built)) if isinstance(built, dict) else built
            for part in parts:
                found.append(_piece(part, tensor, policy.vocab_size))
                if tensor.data_ptr() in covered:
                    covered[tensor.data_ptr()] += part.data.numel()
        for name, parameter in model.named_parameters():
            if is_adapter(name) != adapters:
                continue
            assert covered[parameter.data_ptr()] == parameter.numel(), f"{name} has no global place"
    return found


def _piece(part: ShardedTensor, tensor: Tensor, vocab_size: int) -> ModelPiece:
    data = part.data
    assert data.is_contiguous(), f"{part.key}: a shard of scattered elements"
    shape = [1] * part.prepend_axis_num + list(data.shape)
    global_shape = list(part.global_shape)
    if is_vocabulary(part.key):
        # The padding of the vocabulary depends on TP, but the stored shape must not depend on it.
        global_shape[0] = vocab_size
        shape[0] = max(0, min(shape[0], vocab_size - part.global_offset[0]))
    offset = list(part.global_offset)
    if is_one_matrix(part.key):
        # Store [experts, 2 * ffn, hidden] as [experts, 2, ffn, hidden]. No part has rows of both
        # halves, because Megatron-Core's factory for gated layers cuts between them.
        width = global_shape[1] // 2
        half, first = divmod(offset[1], width)
        assert first + shape[1] <= width, f"rows of both halves: {offset}, {shape}"
        shape[1:1] = [1]
        global_shape[1:2] = [2, width]
        offset[1:2] = [half, first]
    replica = part.replica_id
    return ModelPiece(
        key=native_name(part.key),
        tensor=tensor,
        start=data.storage_offset() - tensor.storage_offset(),
        shape=tuple(shape),
        global_shape=tuple(global_shape),
        offset=tuple(offset),
        replica=replica if isinstance(replica, tuple) else (replica,),
    )


def pieces_to_write(pieces: Sequence[ModelPiece]) -> Iterator[Piece]:
    """Yield this rank's share of the weights. Only one of the data-parallel ranks that hold a piece
    writes it. The pieces are assigned from the largest to the smallest, each to the rank with the
    least to write so far."""
    dense = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    expert = parallel_state.get_expert_data_parallel_world_size()
    for size, is_expert in ((dense, False), (expert, True)):
        loads = [0] * size
        of_group = [p for p in pieces if getattr(p.tensor, "allreduce", True) != is_expert]
        mine = [p for p in of_group if p.is_original]
        # A stable sort gives the same order on all ranks.
        for piece in sorted(mine, key=lambda p: -math.prod(p.shape)):
            writer = loads.index(min(loads))
            loads[writer] += math.prod(piece.shape)
            if writer == piece.replica[-1] and math.prod(piece.shape):
                yield piece.whole()


def pieces_to_read(pieces: Sequence[ModelPiece]) -> Iterator[Piece]:
    """Yield all pieces, including replicas. Vocabulary padding is not stored and becomes zero."""
    for piece in pieces:
        if is_vocabulary(piece.key):
            with torch.no_grad():
                piece.tensor[piece.shape[0] :].zero_()
        if math.prod(piece.shape):
            yield piece.whole()


def boxes(
    shape: Sequence[int], start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield boxes (offset, size) that together are the elements `start` to `stop` of a flattened
    tensor, in order. There are at most 2 * axes - 1 of them."""
    if len(shape) < 2 and start < stop:
        yield (start,) * len(shape), (stop - start,) * len(shape)
        return
    row = math.prod(shape[1:])
    while start < stop:
        index, inside = divmod(start, row)
        rows = 0 if inside else (stop - start) // row
        if rows:
            yield (index, *[0] * (len(shape) - 1)), (rows, *shape[1:])
            start += rows * row
            continue
        end = min(stop - index * row, row)
        for offset, size in boxes(shape[1:], inside, end):
            yield (index, *offset), (1, *size)
        start = index * row + end


def keeps_scales(policy: Policy) -> bool:
    """Whether the policy uses delayed scaling, which scales FP8 matrix products by the largest
    values of earlier micro-batches. Blockwise scaling and MXFP8 compute each scale from the current
    tensor, so they keep no scales."""
    return bool(policy.config.fp8) and policy.config.fp8_recipe == "delayed"


def scale_pieces(policy: Policy, *, originals_only: bool) -> list[Piece]:
    """List the scales and histories of all matrix products of this rank. The list is empty if the
    policy keeps no scales. For modules that have not computed yet, scales and histories are
    allocated.

    All ranks of a pipeline stage hold the same values. `originals_only`: list them only on the
    first of the ranks that hold a copy. Transformer Engine's own form, a pickle per module, is not
    used, because newer versions of Transformer Engine refuse to read it.
    """
    if not keeps_scales(policy):
        return []
    recipe = get_fp8_recipe(policy.config)
    found: list[Piece] = []
    for model in policy.models:
        entries = model.sharded_state_dict(metadata={"non_homogeneous_layers": True})
        for name, entry in entries.items():
            # A module with one weight per expert also has ..._extra_state1 and so on, which are
            # left out.
            if not (isinstance(entry, ShardedObject) and name.endswith(_EXTRA_STATE)):
                continue
            module = model.get_submodule(name.removesuffix(f".{_EXTRA_STATE}"))
            # Only linear layers have scales. Attention computes in higher precision.
            kinds = {kind.__name__ for kind in type(module).__mro__} & _LINEAR
            if not (kinds and hasattr(module, "fp8_meta")):
                continue
            if originals_only and any(entry.replica_id):
                continue
            # Allocates the scales, as the first forward pass would.
            if "scaling_bwd" not in module.fp8_meta:
                module.fp8_meta["recipe"] = recipe
                module.fp8_meta["num_gemms"] = getattr(module, "num_gemms", 1)
                module.init_fp8_meta_tensors(recipe)
            key = entry.key.removesuffix(f".{_EXTRA_STATE}")
            found += scale_boxes(module, key, entry.global_offset[-1], entry.global_shape[-1])
    return found


def scale_boxes(module: Any, key: str, first: int, total: int) -> Iterator[Piece]:
    """Yield the scales of one module. `first` is the number of its first expert among `total`.
    Without experts, `first` is 0 and `total` is 1.

    Transformer Engine holds the scales as [tensors] and their history as [history, tensors]. An
    expert has three tensors in the forward pass (input, weight, output) and two in the backward
    pass (gradients). All tensors of one expert come before the tensors of the next expert.
    """
    experts = module.fp8_meta["num_gemms"]
    for direction, state in _DIRECTIONS.items():
        for name in _TENSORS:
            tensor: Tensor = getattr(module.fp8_meta[state], name)
            rows = tensor.shape[:-1]  # the history's axis; () for the scale
            data = tensor.view(*rows, experts, -1)
            yield Piece(
                f"fp8.{name}_{direction}.{key}",
                data,
                (*rows, total, data.shape[-1]),
                (*(0 for _ in rows), first, 0),
            )
