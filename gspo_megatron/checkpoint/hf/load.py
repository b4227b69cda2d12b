"""Weights of a Hugging Face folder straight into a sharded model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from gspo_megatron.checkpoint.hf.files import check_tied_copy, checked_folder
from gspo_megatron.checkpoint.hf.weight_map import Slices, WeightMap, fill, is_vocabulary
from gspo_megatron.models.build import Policy
from gspo_megatron.models.shards import parameter_shards


@torch.no_grad()
def load_hf(path: str | Path, policy: Policy) -> None:
    """Fill this rank's parameters, and the biases of its routers, from the folder.

    Each rank reads only what its own shards need; values are converted to the model's dtype,
    padding of the vocabulary becomes zero. An optimizer that exists already keeps its fp32 copies
    of the old weights: load before it is built, or call its reload_model_params.

    Raises DataError, with all that is wrong with the folder and before anything is changed.
    """
    folder, weights = checked_folder(path, policy.shape, policy.vocab_size)
    shards = weight_shards(policy, weights)
    for shard in shards:
        if shard.name == "embedding.word_embeddings.weight":
            for box in weights[shard.name].cut(shard.slices):
                check_tied_copy(folder, weights, box)
    for shard in shards:
        fill(shard.data, weights[shard.name], shard.slices, folder.read)


@dataclass(frozen=True)
class WeightShard:
    """A view of this rank's memory that holds a slice of the Megatron tensor `name`."""

    name: str
    data: Tensor
    slices: Slices  # may reach into the vocabulary's padding

    @property
    def is_expert(self) -> bool:
        """Whether it is sharded over the expert-parallel ranks."""
        return ".experts." in self.name


def weight_shards(policy: Policy, weights: WeightMap) -> list[WeightShard]:
    """All of this rank's parameters, each element once, and the biases of its routers."""
    found = [shard for model in policy.models for shard in _shards_of(model)]
    covered = sum(shard.data.numel() for shard in found if ".expert_bias" not in shard.name)
    parameters = sum(p.numel() for model in policy.models for p in model.parameters())
    assert covered == parameters, "a parameter without a global name"
    for shard in found:
        shape = weights[shard.name].shape
        inside = [part.stop <= size for part, size in zip(shard.slices, shape, strict=True)]
        if is_vocabulary(shard.name):
            inside = inside[1:]
        assert all(inside), f"{shard.name}: {shard.slices} of {shape}"
    return found


def _shards_of(model: torch.nn.Module) -> Iterator[WeightShard]:
    for shard in parameter_shards(model):
        yield WeightShard(shard.name, shard.data, shard.slices)
    for module in model.modules():
        bias = getattr(module, "expert_bias", None) if isinstance(module, TopKRouter) else None
        if bias is not None:
            # a buffer, so not among the parameters; every rank of the layer has all of it
            name = f"decoder.layers.{module.layer_number - 1}.mlp.router.expert_bias"
            yield WeightShard(name, bias, (slice(0, len(bias)),))
