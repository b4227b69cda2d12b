"""Loads weights of a Hugging Face folder, or adapters of a PEFT folder, into a sharded model."""

from __future__ import annotations

from pathlib import Path

import torch
from megatron.core.transformer.moe.router import TopKRouter

from gspo_megatron.config.lora import LoraSection
from gspo_megatron.families.adapter_map import adapter_map, is_adapter
from gspo_megatron.families.family import Family
from gspo_megatron.families.weight_map import SCORE_HEAD, WeightMap, fill, is_vocabulary
from gspo_megatron.hf.adapters import fitting_adapters, peft_maps
from gspo_megatron.hf.files import check_tied_copy, checked_folder
from gspo_megatron.models.build import Policy
from gspo_megatron.models.shards import Shard, parameter_shards


@torch.no_grad()
def load_hf(path: str | Path, policy: Policy, *, ignore_custom_code: bool = False) -> None:
    """Fill this rank's parameters, and the biases of its routers, from the folder.

    Each rank reads only the tensors, or parts of tensors, of its own shards. Values are converted
    to the model's dtype, and the vocabulary's padding becomes zero. An optimizer that exists
    already would keep fp32 copies of the old weights. So load the weights before you build the
    optimizer, or call reload_model_params of the optimizer afterwards.
    ignore_custom_code: see `HfFolder`.

    Raises DataError with all problems of the folder, before any parameter is changed.
    """
    folder, weights = checked_folder(
        path, policy.shape, policy.vocab_size, ignore_custom_code=ignore_custom_code
    )
    shards = weight_shards(policy, weights)
    # a language model's folder has no score head, so the head stays random
    if SCORE_HEAD not in folder.tensors:
        shards = [shard for shard in shards if shard.name != SCORE_HEAD]
    for shard in shards:
        if shard.name == "embedding.word_embeddings.weight":
            for box in weights[shard.name].cut(shard.slices):
                check_tied_copy(folder, weights, box)
    for shard in shards:
        fill(shard.data, weights[shard.name], shard.slices, folder.read)


def weight_shards(policy: Policy, weights: WeightMap) -> list[Shard]:
    """Return the shards of this rank's parameters, without adapters, and of the biases of its
    routers. Each element is in one shard. The shards may reach into the vocabulary's padding."""
    all_shards = (shard for model in policy.models for shard in parameter_shards(model))
    shards = [shard for shard in all_shards if not is_adapter(shard.name)]
    count = sum(shard.data.numel() for shard in shards)
    for model in policy.models:
        for module in model.modules():
            bias = getattr(module, "expert_bias", None) if isinstance(module, TopKRouter) else None
            if bias is not None:
                # The bias is a buffer and not a parameter. Every rank with this layer has the whole
                # bias.
                name = f"decoder.layers.{module.layer_number - 1}.mlp.router.expert_bias"
                shards.append(Shard(name, bias, bias, tuple(bias.shape), (0,)))
    pairs = (pair for model in policy.models for pair in model.named_parameters())
    parameters = sum(p.numel() for name, p in pairs if not is_adapter(name))
    assert count == parameters, "a parameter without a global name"
    for shard in shards:
        shape = weights[shard.name].shape
        inside = [part.stop <= size for part, size in zip(shard.slices, shape, strict=True)]
        if is_vocabulary(shard.name):
            inside = inside[1:]
        assert all(inside), f"{shard.name}: {shard.slices} of {shape}"
    return shards


@torch.no_grad()
def load_adapters(path: str | Path, policy: Policy, section: LoraSection, family: Family) -> None:
    """Fill this rank's adapters from a PEFT folder. Raises DataError if they do not fit `section`
    and the model, before any adapter is changed. family: the model's family, which knows the names
    of the tensors."""
    assert policy.lora is not None, "a model without adapters"
    adapters = adapter_map(policy.lora.adapted, policy.lora.rank)
    maps = peft_maps(family, policy.shape, policy.vocab_size)
    folder = fitting_adapters(path, section, policy.lora.adapted, maps)
    for shard in adapter_shards(policy):
        fill(shard.data, adapters[shard.name], shard.slices, folder.read)


def adapter_shards(policy: Policy) -> list[Shard]:
    """This rank's shards of all adapters."""
    shards = (shard for model in policy.models for shard in parameter_shards(model))
    return [shard for shard in shards if is_adapter(shard.name)]
