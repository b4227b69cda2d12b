"""Shapes of the models that have a name.

Everything under `megatron` is a keyword argument of megatron-core's TransformerConfig, in its own
names; what belongs to the whole model (vocabulary, positions, tied embeddings) stands beside it.
The Qwen3 figures are those of `config.json` in Qwen/Qwen3-30B-A3B and Qwen/Qwen3-235B-A22B.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class ModelPreset:
    """A named model; `vocab_size` None means that the tokenizer decides. `joint_qk_norm`: its
    qk_layernorm is over all heads together."""

    vocab_size: int | None
    max_sequence_length: int
    rotary_base: float
    tie_embeddings: bool
    megatron: Mapping[str, Any]
    joint_qk_norm: bool = False


_QWEN3_MOE: dict[str, Any] = {
    "normalization": "RMSNorm",
    "layernorm_epsilon": 1e-6,
    "qk_layernorm": True,
    "add_bias_linear": False,
    "add_qkv_bias": False,
    "gated_linear_unit": True,
    "activation_func": "silu",
    # Dropout would make the old and the new policy differ by noise: their ratio is the objective.
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    # Softmax over the chosen experts only is what Qwen3 calls norm_topk_prob.
    "moe_router_pre_softmax": False,
    "moe_router_dtype": "fp32",
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 1e-3,
    "moe_token_dispatcher_type": "alltoall",
}

PRESETS: Mapping[str, ModelPreset] = MappingProxyType(
    {
        "tiny": ModelPreset(
            vocab_size=None,
            max_sequence_length=128,
            rotary_base=10_000.0,
            tie_embeddings=False,
            megatron=MappingProxyType(
                {
                    "num_layers": 4,
                    "hidden_size": 64,
                    "num_attention_heads": 4,
                    "num_query_groups": 2,
                    "kv_channels": 16,
                    "ffn_hidden_size": 256,
                    "num_moe_experts": 8,
                    "moe_router_topk": 2,
                    "moe_ffn_hidden_size": 64,
                    **_QWEN3_MOE,
                }
            ),
        ),
        "qwen3-30b-a3b": ModelPreset(
            vocab_size=151_936,
            max_sequence_length=40_960,
            rotary_base=1_000_000.0,
            tie_embeddings=False,
            megatron=MappingProxyType(
                {
                    "num_layers": 48,
                    "hidden_size": 2048,
                    "num_attention_heads": 32,
                    "num_query_groups": 4,
                    "kv_channels": 128,
                    "ffn_hidden_size": 6144,
                    "num_moe_experts": 128,
                    "moe_router_topk": 8,
                    "moe_ffn_hidden_size": 768,
                    **_QWEN3_MOE,
                }
            ),
        ),
        "qwen3-235b-a22b": ModelPreset(
            vocab_size=151_936,
            max_sequence_length=40_960,
            rotary_base=1_000_000.0,
            tie_embeddings=False,
            megatron=MappingProxyType(
                {
                    "num_layers": 94,
                    "hidden_size": 4096,
                    "num_attention_heads": 64,
                    "num_query_groups": 4,
                    "kv_channels": 128,
                    "ffn_hidden_size": 12_288,
                    "num_moe_experts": 128,
                    "moe_router_topk": 8,
                    "moe_ffn_hidden_size": 1536,
                    **_QWEN3_MOE,
                }
            ),
        ),
    }
)
