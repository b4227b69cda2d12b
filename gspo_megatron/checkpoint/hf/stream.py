"""The weights of a sharded, running model as Hugging Face tensors, one after the other."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from gspo_megatron.checkpoint.hf.load import WeightShard, weight_shards
from gspo_megatron.checkpoint.hf.weight_map import Box, WeightMap, gather, weight_map
from gspo_megatron.checkpoint.hf.writer import TensorSpec
from gspo_megatron.config.families import Family, family_of_shape
from gspo_megatron.models.build import Policy

MAIN_RANK = 0  # the ranks that share a model-parallel group with it hold a whole model


@dataclass(frozen=True)
class _Part:
    """What one rank adds to an HF tensor: a box of one of its shards."""

    rank: int
    shard: int  # its number among the shards of that rank
    box: Box


@torch.no_grad()
def stream_hf(
    policy: Policy,
    *,
    family: Family | None = None,
    dtype: torch.dtype | None = None,
    everywhere: bool = False,
) -> Iterator[tuple[str, Tensor | None]]:
    """Yield (name, tensor) of every tensor of the published layout, layer by layer. All ranks
    iterate together, to the end; a tensor belongs to the caller.

    The main rank gets each tensor whole, the others None; with `everywhere` all ranks get it. Only
    one tensor exists at a time beside the model. The ranks of one copy of the model send their
    shards to the main rank, each element once.

    family: whose names are used (default: the one that has models of this shape; ConfigError where
    none has); dtype: of the tensors (default: the model's).
    """
    family = family_of_shape(policy.shape) if family is None else family
    weights = weight_map(family, policy.shape, policy.vocab_size)
    specs = tensor_specs(policy, weights, dtype)
    for chunk in policy.chunks:
        if chunk.ddp_config.overlap_param_gather:
            # the last update's weights may still be in transit
            chunk.start_param_sync(force_sync=True)
    copy = _ModelCopy(weight_shards(policy, weights), weights)
    rank, device = dist.get_rank(), torch.device(torch.cuda.current_device())
    for name, spec in specs.items():
        tensor = None
        if rank == MAIN_RANK or everywhere:
            tensor = torch.empty(spec.shape, dtype=spec.dtype, device=device)
        copy.collect(name, spec.dtype, tensor)
        if everywhere and dist.get_world_size() > 1:
            dist.broadcast(tensor, src=MAIN_RANK)
        yield name, tensor


def tensor_specs(
    policy: Policy, weights: WeightMap, dtype: torch.dtype | None = None
) -> dict[str, TensorSpec]:
    """Dtype and shape of every tensor of the stream, in order. Biases of routers stay fp32, as in
    Megatron-Core."""
    specs = {}
    for name, shape in weights.shapes.items():
        is_bias = weights.made_of[name][0][0].endswith(".expert_bias")
        kind = torch.float32 if is_bias else dtype or policy.config.params_dtype
        specs[name] = TensorSpec(kind, shape)
    return specs


class _ModelCopy:
    """One copy of the model, spread over the ranks that share a group with the main rank."""

    def __init__(self, shards: list[WeightShard], weights: WeightMap) -> None:
        self._shards = shards
        self._rank = dist.get_rank()
        self._parts: dict[str, list[_Part]] = {}
        self._groups: dict[str, dist.ProcessGroup] = {}
        dense = parallel_state.get_model_parallel_group()
        experts = parallel_state.get_expert_tensor_model_pipeline_parallel_group()
        for group, are_experts in ((dense, False), (experts, True)):
            if MAIN_RANK in dist.get_process_group_ranks(group):
                self._distribute(group, are_experts, weights)
        if self._rank == MAIN_RANK:
            for name, shape in weights.shapes.items():
                found = sum(part.box.numel for part in self._parts[name])
                assert found == math.prod(shape), f"{name}: {found} elements of {list(shape)}"

    def _distribute(self, group: dist.ProcessGroup, are_experts: bool, weights: WeightMap) -> None:
        """Exchange what each rank of a group holds; of replicas, the first rank sends."""
        mine = [
            (number, shard.name, tuple((part.start, part.stop) for part in shard.slices))
            for number, shard in enumerate(self._shards)
            if shard.is_expert == are_experts
        ]
        ranks = dist.get_process_group_ranks(group)
        everyone: list[Any] = [mine] * len(ranks)
        if len(ranks) > 1:
            dist.all_gather_object(everyone, mine, group=group)
        taken = set()
        for rank, shards in zip(ranks, everyone, strict=True):
            for number, name, place in shards:
                if (name, place) in taken:
                    continue
                taken.add((name, place))
                for box in weights[name].cut([slice(*bounds) for bounds in place]):
                    self._parts.setdefault(box.name, []).append(_Part(rank, number, box))
                    self._groups[box.name] = group

    def collect(self, name: str, dtype: torch.dtype, out: Tensor | None) -> None:
        """Send this rank's parts of a tensor, as `dtype`; or, on the main rank, fill `out`."""
        parts = self._parts.get(name, [])
        if self._rank == MAIN_RANK:
            assert out is not None
            local = [part for part in parts if part.rank == MAIN_RANK]
            gather(out, [(part.box, self._shards[part.shard].data) for part in local])
            self._receive(name, [part for part in parts if part.rank != MAIN_RANK], out)
            return
        mine = [part for part in parts if part.rank == self._rank]
        if mine:
            data = [self._shards[part.shard].data[part.box.target_slices] for part in mine]
            packed = torch.cat([part.reshape(-1).to(dtype) for part in data])
            _exchange([dist.P2POp(dist.isend, packed, MAIN_RANK, self._groups[name])])

    def _receive(self, name: str, parts: list[_Part], out: Tensor) -> None:
        boxes: dict[int, list[Box]] = {}
        for part in parts:
            boxes.setdefault(part.rank, []).append(part.box)
        packed = {
            rank: out.new_empty(sum(box.numel for box in theirs)) for rank, theirs in boxes.items()
        }
        group = self._groups[name]
        _exchange([dist.P2POp(dist.irecv, data, rank, group) for rank, data in packed.items()])
        for rank, theirs in boxes.items():
            runs = packed[rank].split([box.numel for box in theirs])
            for box, run in zip(theirs, runs, strict=True):
                place = out[box.source_slices]
                place.copy_(run.view(place.shape))


def _exchange(messages: list[dist.P2POp]) -> None:
    for request in dist.batch_isend_irecv(messages) if messages else ():
        request.wait()
