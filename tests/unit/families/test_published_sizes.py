"""Published models, by the numbers of their config.json: read without a complaint, and as large as
their model cards say."""

from __future__ import annotations

import math
from typing import Any

import pytest

from gspo_megatron.families import describe, family_of
from gspo_megatron.families.model_shape import shape_of
from gspo_megatron.families.weight_map import weight_map

_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}


def yarn(factor: float, **more: float) -> dict[str, Any]:
    window = {"original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
    return {"type": "yarn", "factor": factor, **window, "mscale": 1.0, "mscale_all_dim": 1.0} | more


def latent(vocabulary: int, layers: int, hidden: int, heads: int, **more: Any) -> dict[str, Any]:
    sizes = {"vocab_size": vocabulary, "num_hidden_layers": layers, "hidden_size": hidden}
    both = {"num_attention_heads": heads, "num_key_value_heads": heads}
    named = {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]}
    return {**named, **sizes, **both, "kv_lora_rank": 512, **more}


def glm(layers: int, hidden: int, experts: int, width: int, **more: Any) -> dict[str, Any]:
    named = {"model_type": "glm4_moe", "architectures": ["Glm4MoeForCausalLM"]}
    sizes = {"vocab_size": 151_552, "num_hidden_layers": layers, "hidden_size": hidden}
    heads = {"num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128}
    routed = {"n_routed_experts": experts, "moe_intermediate_size": width, "n_shared_experts": 1}
    further = {"num_nextn_predict_layers": 1, "partial_rotary_factor": 0.5, "attention_bias": True}
    return {**named, **sizes, **heads, **routed, **further, **more}


def delta(layers: int, hidden: int, experts: int, topk: int, **more: Any) -> dict[str, Any]:
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256}
    widths = {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
    nets = {"linear_num_key_heads": 16, "linear_num_value_heads": 32}
    routed = {"num_experts": experts, "num_experts_per_tok": topk, "full_attention_interval": 4}
    return {**sizes, **heads, **widths, **nets, **routed, **more}


def vision(text: dict[str, Any]) -> dict[str, Any]:
    """As Qwen3.5 is published, with a vision model beside the language model."""
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    rope |= {"mrope_section": [11, 11, 10], "mrope_interleaved": True}
    named = {"model_type": "qwen3_5_moe_text", "vocab_size": 248_320, "rope_parameters": rope}
    more = {"mtp_num_hidden_layers": 1, "attn_output_gate": True, "mamba_ssm_dtype": "float32"}
    return {
        "model_type": "qwen3_5_moe",
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "text_config": named | more | text,
        "vision_config": {"model_type": "qwen3_5_moe", "depth": 27, "hidden_size": 1152},
        "image_token_id": 248_056,
        "tie_word_embeddings": False,
    }


# Parameters in units of 10^9, without the layers for further tokens.
PUBLISHED: dict[str, tuple[dict[str, Any], float]] = {
    "DeepSeek-V3": (
        latent(
            *(129_280, 61, 7168, 128),
            intermediate_size=18_432,
            q_lora_rank=1536,
            n_routed_experts=256,
            moe_intermediate_size=2048,
            num_nextn_predict_layers=1,
            rope_scaling=yarn(40),
            max_position_embeddings=163_840,
            quantization_config=_FP8,
        ),
        671.0,
    ),
    "Kimi-K2": (
        latent(
            *(163_840, 61, 7168, 64),
            model_type="kimi_k2",
            intermediate_size=18_432,
            q_lora_rank=1536,
            n_routed_experts=384,
            moe_intermediate_size=2048,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=1,
            routed_scaling_factor=2.827,
            num_nextn_predict_layers=0,
            rope_theta=50_000.0,
            rope_scaling=yarn(32, beta_fast=1.0),
            max_position_embeddings=131_072,
            quantization_config=_FP8,
        ),
        1026.0,
    ),
    "Moonlight-16B-A3B": (
        latent(
            *(163_840, 27, 2048, 16),
            intermediate_size=11_264,
            q_lora_rank=None,
            n_routed_experts=64,
            num_experts_per_tok=6,
            moe_intermediate_size=1408,
            n_shared_experts=2,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=1,
            routed_scaling_factor=2.446,
            num_nextn_predict_layers=0,
            rope_theta=50_000.0,
            max_position_embeddings=8192,
        ),
        16.0,
    ),
    "GLM-4.5": (
        glm(
            92, 5120, 160, 1536, intermediate_size=12_288, first_k_dense_replace=3, use_qk_norm=True
        ),
        353.0,
    ),
    "GLM-4.5-Air": (glm(46, 4096, 128, 1408, intermediate_size=10_944), 106.9),
    "GLM-4.7-Flash": (
        latent(
            *(154_880, 47, 2048, 20),
            model_type="glm4_moe_lite",
            architectures=["Glm4MoeLiteForCausalLM"],
            intermediate_size=10_240,
            n_routed_experts=64,
            moe_intermediate_size=1536,
            num_nextn_predict_layers=1,
        ),
        29.9,
    ),
    "Qwen3-Next-80B-A3B": (
        delta(
            *(48, 2048, 512, 10),
            model_type="qwen3_next",
            architectures=["Qwen3NextForCausalLM"],
            vocab_size=151_936,
            intermediate_size=5120,
            decoder_sparse_step=1,
            rope_theta=1e7,
            rope_scaling=None,
            partial_rotary_factor=0.25,
            max_position_embeddings=262_144,
        ),
        79.7,
    ),
    "Qwen3.5-35B-A3B": (vision(delta(40, 2048, 256, 8)), 34.66),
    "Qwen3.5-27B": (
        vision(
            delta(
                *(64, 5120, 0, 0),
                model_type="qwen3_5_text",
                intermediate_size=17_408,
                num_attention_heads=24,
                num_key_value_heads=4,
                linear_num_value_heads=48,
            )
        )
        | {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"]},
        26.9,
    ),
    "Qwen3.5-122B-A10B": (
        vision(
            delta(
                *(48, 3072, 256, 8),
                num_attention_heads=32,
                moe_intermediate_size=1024,
                shared_expert_intermediate_size=1024,
                linear_num_value_heads=64,
            )
        ),
        122.1,
    ),
    "Qwen3.5-397B-A17B": (
        vision(
            delta(
                *(60, 4096, 512, 10),
                num_attention_heads=32,
                moe_intermediate_size=1024,
                shared_expert_intermediate_size=1024,
                linear_num_value_heads=64,
            )
        ),
        396.0,
    ),
    "Llama-3.1-8B": (
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": 128_256,
            "num_hidden_layers": 32,
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "intermediate_size": 14_336,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            "max_position_embeddings": 131_072,
        },
        8.03,
    ),
    "Qwen2.5-7B": (
        {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "vocab_size": 152_064,
            "num_hidden_layers": 28,
            "hidden_size": 3584,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "intermediate_size": 18_944,
            "rope_theta": 1e6,
            "sliding_window": 131_072,
            "use_sliding_window": False,
            "max_position_embeddings": 32_768,
        },
        7.62,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters(name: str) -> None:
    hf, billions = PUBLISHED[name]
    shape = shape_of(describe(hf))
    assert shape.vocab_size is not None
    sizes = weight_map(family_of(hf), shape, shape.vocab_size).shapes.values()
    assert sum(map(math.prod, sizes)) / 1e9 == pytest.approx(billions, rel=0.005)
