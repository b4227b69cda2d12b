"""Exports a sharded model during a run: as Hugging Face tensors, one after the other, or as a
folder."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from gspo_megatron.config.lora import LoraSection
from gspo_megatron.errors import DataError
from gspo_megatron.families import Family, family_of, family_of_shape
from gspo_megatron.families.adapter_map import adapter_map, is_of_joint_experts, place_in_joint
from gspo_megatron.families.weight_map import (
    Box,
    WeightMap,
    is_never_rounded,
    native_name,
    weight_map,
)
from gspo_megatron.hf.adapters import peft_layout, peft_maps, write_peft
from gspo_megatron.hf.load import adapter_shards, weight_shards
from gspo_megatron.hf.side_files import (
    export_config,
    generation_files,
    tokenizer_files,
    with_padding,
)
from gspo_megatron.hf.writer import MAX_SHARD_BYTES, HfWriter
from gspo_megatron.models.build import Policy
from gspo_megatron.models.lora import Lora
from gspo_megatron.models.shards import Shard
from gspo_megatron.platform.collectives import all_gather_objects, raised_everywhere

MAIN_RANK = 0  # its model-parallel group holds one whole model


def export_hf(
    policy: Policy,
    path: str | Path,
    *,
    hf_config: Mapping[str, Any] | None = None,
    tokenizer: str | Path | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    durable: bool = True,
    reuse: Path | None = None,
    private: bool = False,
) -> None:
    """Write the model's weights, config.json and tokenizer to the new folder `path`. All ranks must
    call this function. The main rank writes the tensors one after the other. The folder appears
    under its name when it is complete.

    hf_config: the config.json that the weights were loaded with. This config.json decides the
    family. Its keys that do not describe a model are kept.
    tokenizer: a folder, whose settings and tokenizer files are copied, or one file.
    dtype: the dtype of the written weights (default: the model's).
    durable: wait until everything is on the disk, so that a crash of the machine loses nothing.
    reuse: a folder that an earlier call with the same arguments has written and that nobody needs
    any more. If it exists, it is overwritten and renamed, which is faster than a new folder.
    private: no other user may read the folder.

    All ranks raise the same errors: ConfigError if no family has such a model, DataError if the
    folder cannot be written.
    """
    family = family_of_shape(policy.shape) if hf_config is None else family_of(hf_config)
    dtype = dtype or policy.config.params_dtype
    config = export_config(policy.shape, policy.vocab_size, dtype, hf_config)
    specs = stream_specs(policy, family=family, dtype=dtype)
    writer = HfWriter(
        path,
        specs,
        max_shard_bytes=max_shard_bytes,
        durable=durable,
        reuse=reuse,
        private=private,
    )
    is_main = dist.get_rank() == MAIN_RANK
    with contextlib.ExitStack() as stack:
        with raised_everywhere():
            if is_main:
                stack.enter_context(writer)
        problem: DataError | None = None
        with raised_everywhere():
            # If writing fails, the main rank still reads the stream to its end, because the other
            # ranks exchange tensors with it.
            for name, tensor in stream_hf(policy, family=family, dtype=dtype):
                if tensor is not None and problem is None:
                    try:
                        writer.write(name, tensor)
                    except DataError as error:
                        problem = error
            if problem is not None:
                raise problem
            if is_main:
                files = tokenizer_files(tokenizer)
                writer.finish()
                documents = {"config.json": with_padding(config, files), **generation_files(files)}
                writer.publish(documents, files)


@torch.no_grad()
def export_adapter(
    policy: Policy,
    path: str | Path,
    section: LoraSection,
    base: str,
    *,
    hf_config: Mapping[str, Any] | None = None,
    durable: bool = True,
    private: bool = False,
) -> int:
    """Write the policy's adapters to the new PEFT folder `path`, in the same way as `export_hf`.
    Returns the size of the adapters in bytes.

    section: model.lora; base: the folder or name of the model that they belong to. Every rank
    raises DataError for a destination that cannot be written."""
    assert policy.lora is not None, "a model without adapters"
    adapters = adapter_map(policy.lora.adapted, policy.lora.rank)
    policy.finish_parameter_gather()
    copy = _ModelCopy(adapter_shards(policy), adapters)
    kind, device = policy.config.params_dtype, torch.device(torch.cuda.current_device())
    is_main = dist.get_rank() == MAIN_RANK
    tensors: dict[str, Tensor] = {}
    for name, shape in adapters.shapes.items():
        tensor = torch.empty(shape, dtype=kind, device=device) if is_main else None
        copy.collect(name, kind, tensor)
        if tensor is not None:
            tensors[name] = tensor.cpu()
    with raised_everywhere():
        if is_main:
            family = family_of_shape(policy.shape) if hf_config is None else family_of(hf_config)
            maps = peft_maps(family, policy.shape, policy.vocab_size)
            document, tensors = peft_layout(section, policy.lora.adapted, maps, tensors, base)
            write_peft(path, tensors, document, durable=durable, private=private)
    return sum(math.prod(shape) for shape in adapters.shapes.values()) * kind.itemsize


@torch.no_grad()
def stream_hf(
    policy: Policy, *, family: Family | None = None, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor | None]]:
    """Yield (name, tensor) of every tensor in the layout of published files, layer by layer. All
    ranks must iterate together, to the end. The caller may keep or change a tensor.

    The main rank gets each tensor whole, all other ranks get None. The stream holds only one tensor
    at a time. The ranks of one copy of the model send their shards to the main rank, each element
    once.

    family: gives the names (default: the family that has models of this shape, or ConfigError);
    dtype: the dtype of the tensors (default: the model's).
    """
    family = family_of_shape(policy.shape) if family is None else family
    weights = weight_map(family, policy.shape, policy.vocab_size)
    policy.finish_parameter_gather()
    copy = _ModelCopy(weight_shards(policy, weights), weights, policy.lora)
    device = torch.device(torch.cuda.current_device())
    for name, kind in _dtypes(weights, dtype or policy.config.params_dtype).items():
        tensor = None
        if dist.get_rank() == MAIN_RANK:
            tensor = torch.empty(weights.shapes[name], dtype=kind, device=device)
        copy.collect(name, kind, tensor)
        yield name, tensor


def stream_specs(
    policy: Policy, *, family: Family | None = None, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Return the tensors that `stream_hf` yields, in the same order, but on the meta device."""
    family = family_of_shape(policy.shape) if family is None else family
    weights = weight_map(family, policy.shape, policy.vocab_size)
    return {
        name: torch.empty(weights.shapes[name], dtype=kind, device="meta")
        for name, kind in _dtypes(weights, dtype or policy.config.params_dtype).items()
    }


def _dtypes(weights: WeightMap, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The dtype of every tensor of the stream, in order."""
    kinds = dict.fromkeys(weights.shapes, dtype)
    for name, recipe in weights.recipes.items():
        if is_never_rounded(name):
            kinds |= {box.name: torch.float32 for box in recipe.boxes}
    return kinds


class _ModelCopy:
    """One copy of the model, spread over the ranks that share a group with the main rank."""

    def __init__(
        self, shards: Sequence[Shard], weights: WeightMap, lora: Lora | None = None
    ) -> None:
        """lora: the adapters that are merged into the weights before they are sent; None if there
        are none."""
        self._shards, self._weights, self._lora = shards, weights, lora
        # HF tensor -> rank -> the rank's parts of the tensor: (number of the shard, box in the
        # shard)
        self._parts: dict[str, dict[int, list[tuple[int, Box]]]] = {n: {} for n in weights.shapes}
        self._groups: dict[str, dist.ProcessGroup] = {}
        dense = parallel_state.get_model_parallel_group()
        experts = parallel_state.get_expert_tensor_model_pipeline_parallel_group()
        for group, are_experts in ((dense, False), (experts, True)):
            if MAIN_RANK in dist.get_process_group_ranks(group):
                self._distribute(group, are_experts, weights)
        if dist.get_rank() == MAIN_RANK:
            for name, shape in weights.shapes.items():
                count = sum(box.numel for each in self._parts[name].values() for _, box in each)
                assert count == math.prod(shape), f"{name}: {count} elements of {list(shape)}"

    def _distribute(self, group: dist.ProcessGroup, are_experts: bool, weights: WeightMap) -> None:
        """Let all ranks of a group know which boxes each of them holds. If several ranks hold a
        box, the first of them will send it."""
        mine = [
            (number, shard.name, shard.offset, tuple(shard.data.shape))
            for number, shard in enumerate(self._shards)
            if (".experts." in shard.name) == are_experts
        ]
        ranks = dist.get_process_group_ranks(group)
        places = set()
        for rank, shards in zip(ranks, all_gather_objects(mine, group), strict=True):
            for number, name, offset, shape in shards:
                if (name, offset, shape) in places:
                    continue
                places.add((name, offset, shape))
                slices = [slice(at, at + n) for at, n in zip(offset, shape, strict=True)]
                for box in weights[name].cut(slices):
                    self._parts[box.name].setdefault(rank, []).append((number, box))
                    self._groups[box.name] = group

    def collect(self, name: str, dtype: torch.dtype, out: Tensor | None) -> None:
        """Send this rank's parts of a tensor to the main rank as `dtype`. The main rank fills `out`
        with the parts of all ranks."""
        parts, group = self._parts[name], self._groups.get(name)
        mine = [(box, self._values(n, box)) for n, box in parts.get(dist.get_rank(), [])]
        if dist.get_rank() != MAIN_RANK:
            if mine:
                runs = [data.reshape(-1).to(dtype) for _, data in mine]
                _exchange([dist.P2POp(dist.isend, torch.cat(runs), MAIN_RANK, group)])
            return
        assert out is not None
        for box, data in mine:
            out[box.source_slices].copy_(box.to_source(data))
        sizes = {
            rank: [box.numel for _, box in theirs]
            for rank, theirs in parts.items()
            if rank != MAIN_RANK
        }
        packed = {rank: out.new_empty(sum(counts)) for rank, counts in sizes.items()}
        _exchange([dist.P2POp(dist.irecv, data, rank, group) for rank, data in packed.items()])
        for rank, counts in sizes.items():
            for (_, box), run in zip(parts[rank], packed[rank].split(counts), strict=True):
                out[box.source_slices].copy_(box.to_source(run))

    def _values(self, number: int, box: Box) -> Tensor:
        """Return the values of a box of a shard, with its adapter merged."""
        shard = self._shards[number]
        data = shard.data[box.target_slices]
        if self._lora is None:
            return data
        if is_of_joint_experts(box):
            target = [at + start for at, start in zip(shard.offset, box.target, strict=True)]
            recipe = self._weights.recipes[native_name(shard.name)]
            matrix, place = place_in_joint(recipe, target)
            merged = self._lora.merged(data.reshape(box.size[-2:]), matrix, place)
            return merged.reshape(data.shape)
        if len(box.source) != 2:
            return data
        return self._lora.merged(data.reshape(box.source_size), box.name, box.source)


def _exchange(messages: list[dist.P2POp]) -> None:
    for request in dist.batch_isend_irecv(messages) if messages else ():
        request.wait()
