"""What a rank holds of a model, by the names of the map."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from gspo_megatron.checkpoint.hf.arrangement import WeightMap
from gspo_megatron.checkpoint.hf.pieces import Slices
from gspo_megatron.models.build import Policy
from gspo_megatron.models.shards import parameter_shards


@dataclass(frozen=True)
class Held:
    """A view of a rank's memory, and what it is of the Megatron tensor `name`."""

    name: str
    data: Tensor
    slices: Slices  # may reach into the vocabulary's padding

    @property
    def is_expert(self) -> bool:
        """Whether it is cut over the expert-parallel ranks."""
        return ".experts." in self.name


def held_tensors(policy: Policy, weights: WeightMap) -> list[Held]:
    """Every element of this rank's parameters once, and the biases of its routers."""
    found = [held for model in policy.models for held in _of_model(model)]
    covered = sum(held.data.numel() for held in found if ".expert_bias" not in held.name)
    parameters = sum(p.numel() for model in policy.models for p in model.parameters())
    assert covered == parameters, "a parameter without a global name"
    for held in found:
        shape = weights[held.name].shape
        inside = [part.stop <= size for part, size in zip(held.slices, shape, strict=True)]
        if is_vocabulary(held.name):
            inside = inside[1:]
        assert all(inside), f"{held.name}: {held.slices} of {shape}"
    return found


def is_vocabulary(name: str) -> bool:
    """Whether the rows of a tensor are the vocabulary, which is padded."""
    return name.endswith(("word_embeddings.weight", "output_layer.weight"))


def _of_model(model: torch.nn.Module) -> Iterator[Held]:
    for shard in parameter_shards(model):
        yield Held(shard.name, shard.data, shard.slices)
    for module in model.modules():
        bias = getattr(module, "expert_bias", None) if isinstance(module, TopKRouter) else None
        if bias is not None:
            # a buffer, so not among the shards; every rank of the layer has all of it
            name = f"decoder.layers.{module.layer_number - 1}.mlp.router.expert_bias"
            yield Held(name, bias, (slice(0, len(bias)),))
