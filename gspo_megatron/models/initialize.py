"""Initial weights that do not depend on the layout.

Megatron-Core draws each shard from its rank's generator, so TP=1 and TP=2 start from different
models. Here each full tensor is drawn from a generator that is seeded by the run's seed and the
tensor's name.
"""

from __future__ import annotations

import hashlib
import math
import re

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from gspo_megatron.families.adapter_map import is_adapter
from gspo_megatron.families.weight_map import is_vocabulary, native_name
from gspo_megatron.models.shards import Shard, parameter_shards

# Projections into the residual stream start smaller, by 1 / sqrt(2 * layers), because each layer
# adds the outputs of two such projections (Megatron-Core's scaled_init_method_normal; GPT-2,
# section 2.3).
_RESIDUAL_PROJECTIONS = (
    *("linear_proj.weight", "linear_fc2.weight", "experts.weight2"),
    "self_attention.out_proj.weight",
)
_DECAY = ".A_log"  # the decay of delta nets: logarithms of numbers between 1 and 16

_ZEROS = (".bias", ".softmax_offset")


@torch.no_grad()
def initialize_weights(
    model: torch.nn.Module, config: TransformerConfig, true_vocab_size: int, seed: int
) -> None:
    """Draw all matrices of a model chunk, and the decay of delta nets. Biases and sinks become
    zeros; the weights of norms stay ones."""
    shards = list(parameter_shards(model))
    covered = sum(shard.data.numel() for shard in shards)
    assert covered == sum(p.numel() for p in model.parameters()), (
        "a parameter without a global name"
    )
    for shard in shards:
        if any(part in shard.name for part in _ZEROS):
            shard.data.zero_()  # a router's bias may be uninitialised memory
            continue
        is_decay = shard.name.endswith(_DECAY)
        if shard.data.dim() < 2 and not is_decay:
            continue
        std = config.init_method_std
        if any(part in shard.name for part in _RESIDUAL_PROJECTIONS):
            std /= math.sqrt(2.0 * config.num_layers)
        shape = list(shard.global_shape)
        if is_vocabulary(shard.name):
            shape[0] = true_vocab_size  # without the padding, whose size depends on TP
        # An adapter needs the same name on both backends, so that it gets the same random numbers.
        name = native_name(shard.name) if is_adapter(shard.name) else shard.name
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        if is_adapter(shard.name):
            _initialize_adapter(shard, shape, generator)
            continue
        if is_decay:
            drawn = torch.rand(shape, generator=generator)[shard.slices].mul(15).add(1).log()
        else:
            drawn = torch.randn(shape, generator=generator)[shard.slices] * std
        shard.data.zero_()  # vocabulary padding
        shard.data[tuple(slice(size) for size in drawn.shape)].copy_(drawn)


def _initialize_adapter(shard: Shard, shape: list[int], generator: torch.Generator) -> None:
    """Draw A uniformly from +-1 / sqrt(in), as PEFT does. B is zero, so the adapter changes
    nothing."""
    shard.data.zero_()
    if re.search(r"\.a(\[\d+\])?$", shard.name):
        drawn = 2 * torch.rand(shape, generator=generator)[shard.slices] - 1
        shard.data.copy_(drawn / math.sqrt(shape[1]))
