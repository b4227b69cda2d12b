"""The config.json of each published model can be read, and gives the sizes of the model card."""

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


def ling(
    layers: int, hidden: int, heads: int, width: int, experts: int, dense: int = 1, **more: Any
) -> dict[str, Any]:
    """The config of a Ling model. width: the width of the MLP in dense layers; experts: the width
    of an expert."""
    named = {"model_type": "bailing_moe", "architectures": ["BailingMoeV2ForCausalLM"]}
    sizes = {"vocab_size": 157_184, "num_hidden_layers": layers, "hidden_size": hidden}
    both = {"num_attention_heads": heads, "num_key_value_heads": 4, "head_dim": 128}
    widths = {"intermediate_size": width, "moe_intermediate_size": experts}
    routed = {"num_experts": 256, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4}
    shared = {"num_shared_experts": 1, "first_k_dense_replace": dense, "use_qk_norm": True}
    further = {"num_nextn_predict_layers": 1, "use_qkv_bias": False}
    rotated = {} if "rotary_dim" in more else {"partial_rotary_factor": 0.5}
    return {**named, **sizes, **both, **widths, **routed, **shared, **further, **rotated, **more}


def ernie(
    layers: int, hidden: int, heads: int, keys: int, width: int, experts: int, k: int, **more: Any
) -> dict[str, Any]:
    """The config of an ERNIE model. width: the width of the MLP in dense layers; experts: the width
    of an expert."""
    named = {"model_type": "ernie4_5_moe", "architectures": ["Ernie4_5_MoeForCausalLM"]}
    sizes = {"vocab_size": 103_424, "num_hidden_layers": layers, "hidden_size": hidden}
    both = {"num_attention_heads": heads, "num_key_value_heads": keys}
    widths = {"intermediate_size": width, "moe_intermediate_size": experts}
    routed = {"moe_num_experts": 64, "moe_k": k, "moe_layer_interval": 1, "use_bias": False}
    rope = {"rope_theta": 500_000.0, "max_position_embeddings": 131_072}
    return {**named, **sizes, **both, **widths, **routed, **rope, **more}


def delta(layers: int, hidden: int, experts: int, topk: int, **more: Any) -> dict[str, Any]:
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256}
    widths = {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
    nets = {"linear_num_key_heads": 16, "linear_num_value_heads": 32}
    routed = {"num_experts": experts, "num_experts_per_tok": topk, "full_attention_interval": 4}
    return {**sizes, **heads, **widths, **nets, **routed, **more}


def qwen3_next(**more: Any) -> dict[str, Any]:
    named = {"model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"]}
    rope = {"rope_theta": 1e7, "rope_scaling": None, "partial_rotary_factor": 0.25}
    sizes = {"vocab_size": 151_936, "intermediate_size": 5120, "decoder_sparse_step": 1}
    sizes["max_position_embeddings"] = 262_144
    return delta(48, 2048, 512, 10, **named, **sizes, **rope | more)


def vision(text: dict[str, Any]) -> dict[str, Any]:
    """The config of Qwen3.5 as published, with a vision model beside the language model."""
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    rope |= {"mrope_section": [11, 11, 10], "mrope_interleaved": True}
    named = {"model_type": "qwen3_5_moe_text", "vocab_size": 248_320, "rope_parameters": rope}
    more = {"mtp_num_hidden_layers": 1, "attn_output_gate": True, "mamba_ssm_dtype": "float32"}
    # beside rope_parameters, as published
    more |= {"partial_rotary_factor": 0.25, "mlp_only_layers": []}
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    more["layer_types"] = kinds * (text["num_hidden_layers"] // len(kinds))
    return {
        "model_type": "qwen3_5_moe",
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "text_config": named | more | text,
        "vision_config": {"model_type": "qwen3_5_moe", "depth": 27, "hidden_size": 1152},
        "image_token_id": 248_056,
        "tie_word_embeddings": False,
    }


def dense_vision(
    layers: int, hidden: int, width: int, queries: int, keys: int, values: int, tied: bool = False
) -> dict[str, Any]:
    """The config of a dense Qwen3.5 model. values: the number of value heads of a delta net."""
    kind = {"model_type": "qwen3_5_text", "intermediate_size": width}
    sizes = heads(queries, keys, linear_num_value_heads=values)
    outer = {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"]}
    text = delta(layers, hidden, 0, 0, **kind, **sizes)
    return vision(text) | outer | {"tie_word_embeddings": tied}


def gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    window = {"original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0}
    kinds = ["sliding_attention", "full_attention"] * (layers // 2)
    return {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "attention_bias": True,
        "experts_per_token": 4,
        "num_experts_per_tok": 4,
        "num_local_experts": experts,
        "num_hidden_layers": layers,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "hidden_act": "silu",
        "layer_types": kinds,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "rope_theta": 150_000,
        "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "truncate": False} | window,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "router_aux_loss_coef": 0.9,
        "tie_word_embeddings": False,
        "vocab_size": 201_088,
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    }


def plain(kind: str, vocabulary: int, layers: int, hidden: int, **more: Any) -> dict[str, Any]:
    """The config of a model with grouped-query attention: Qwen3MoeForCausalLM."""
    words = kind.removesuffix("ForCausalLM").replace("Moe", "_moe")
    named = {"model_type": words.lower(), "architectures": [kind]}
    sizes = {"vocab_size": vocabulary, "num_hidden_layers": layers, "hidden_size": hidden}
    return {**named, **sizes, **more}


def heads(queries: int, keys: int, **more: Any) -> dict[str, Any]:
    return {"num_attention_heads": queries, "num_key_value_heads": keys, **more}


def experts(count: int, k: int, width: int) -> dict[str, Any]:
    return {"num_experts": count, "num_experts_per_tok": k, "moe_intermediate_size": width}


def qwen3(layers: int, hidden: int, queries: int, keys: int, **more: Any) -> dict[str, Any]:
    kind = "Qwen3MoeForCausalLM" if "num_experts" in more else "Qwen3ForCausalLM"
    sizes = heads(queries, keys, head_dim=128, rope_theta=1e6, max_position_embeddings=40_960)
    return plain(kind, 151_936, layers, hidden, **sizes | more)


def llama3(factor: float, layers: int, hidden: int, queries: int, **more: Any) -> dict[str, Any]:
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    context = {"rope_theta": 500_000.0, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5}
    sizes = heads(queries, 8, rope_scaling=scaling, **context)
    return plain("LlamaForCausalLM", 128_256, layers, hidden, **sizes, **more)


def mixtral_8x22b(vocabulary: int) -> dict[str, Any]:
    return plain(
        *("MixtralForCausalLM", vocabulary, 56, 6144),
        **heads(48, 8, rope_theta=1e6),
        intermediate_size=16_384,
        num_local_experts=8,
        num_experts_per_tok=2,
    )


GLM_4_5 = glm(
    92, 5120, 160, 1536, intermediate_size=12_288, first_k_dense_replace=3, use_qk_norm=True
)
LARGE_DELTA = heads(32, 2, moe_intermediate_size=1024, shared_expert_intermediate_size=1024)
LARGE_DELTA["linear_num_value_heads"] = 64

# Parameters in units of 10^9, without the layers that predict further tokens. The layouts for 1,024
# ranks are in tests/unit/cli/test_check_published.py.
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
    "GLM-4.5": (GLM_4_5, 353.0),
    "GLM-4.6": (GLM_4_5 | {"max_position_embeddings": 202_752}, 353.0),
    "GLM-4.5-Air": (glm(46, 4096, 128, 1408, intermediate_size=10_944), 106.9),
    "GLM-4.7-Flash": (
        latent(
            *(154_880, 47, 2048, 20),
            model_type="glm4_moe_lite",
            architectures=["Glm4MoeLiteForCausalLM"],
            intermediate_size=10_240,
            q_lora_rank=768,
            qk_nope_head_dim=192,
            qk_rope_head_dim=64,
            v_head_dim=256,
            n_routed_experts=64,
            num_experts_per_tok=4,
            moe_intermediate_size=1536,
            n_shared_experts=1,
            first_k_dense_replace=1,
            routed_scaling_factor=1.8,
            n_group=1,
            topk_group=1,
            topk_method="noaux_tc",
            num_nextn_predict_layers=1,
            partial_rotary_factor=1.0,
            rope_theta=1e6,
            rope_scaling=None,
            max_position_embeddings=202_752,
            rms_norm_eps=1e-5,
        ),
        29.9,
    ),
    "MiniMax-M2": (
        {
            "architectures": ["MiniMaxM2ForCausalLM"],
            "model_type": "minimax_m2",
            "vocab_size": 200_064,
            "num_hidden_layers": 62,
            "hidden_size": 3072,
            "num_attention_heads": 48,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 1536,
            "num_local_experts": 256,
            "num_experts_per_tok": 8,
            "rope_theta": 5_000_000,
            "rotary_dim": 64,
            "scoring_func": "sigmoid",
            "qk_norm_type": "per_layer",
            "num_mtp_modules": 3,
            "use_mtp": True,
            "mtp_transformer_layers": 1,
            "use_routing_bias": True,
            "use_qk_norm": True,
            "attn_type_list": [1] * 62,
            "shared_intermediate_size": 0,
            "sliding_window": None,
            "max_position_embeddings": 196_608,
            "quantization_config": _FP8 | {"fmt": "float8_e4m3fn"},
        },
        228.7,
    ),
    "Ling-mini-2.0": (ling(20, 2048, 16, 5120, 512), 16.3),
    "Ling-flash-2.0": (ling(32, 4096, 32, 9216, 1024), 102.9),
    "Ling-1T": (
        ling(80, 8192, 64, 18_432, 2048, 4, num_key_value_heads=8, rotary_dim=64),
        1000.0,
    ),
    "ERNIE-4.5-21B-A3B": (
        ernie(
            *(28, 2560, 20, 4, 12_288, 1536, 6),
            moe_num_shared_experts=2,
            moe_layer_start_index=1,
            moe_layer_end_index=27,
            tie_word_embeddings=True,
        ),
        21.8,
    ),
    "ERNIE-4.5-300B-A47B": (
        ernie(
            *(54, 8192, 64, 8, 28_672, 3584, 8),
            moe_num_shared_experts=0,
            moe_layer_start_index=3,
            moe_layer_end_index=53,
            tie_word_embeddings=False,
        ),
        299.5,
    ),
    "Qwen3-Next-80B-A3B": (qwen3_next(), 79.7),
    "Qwen3-Next-80B-A3B-FP8": (qwen3_next(quantization_config=_FP8), 79.7),
    "Qwen3-Coder-Next": (qwen3_next(rope_theta=5e6, use_sliding_window=False), 79.7),
    "Qwen3.5-35B-A3B": (vision(delta(40, 2048, 256, 8)), 34.66),
    "Qwen3.5-0.8B": (dense_vision(24, 1024, 3584, 8, 2, 16, tied=True), 0.752),
    "Qwen3.5-9B": (dense_vision(32, 4096, 12_288, 16, 4, 32), 8.95),
    "Qwen3.5-27B": (dense_vision(64, 5120, 17_408, 24, 4, 48), 26.9),
    "Qwen3.5-122B-A10B": (vision(delta(48, 3072, 256, 8, **LARGE_DELTA)), 122.1),
    "Qwen3.5-397B-A17B": (vision(delta(60, 4096, 512, 10, **LARGE_DELTA)), 396.0),
    "gpt-oss-20b": (gpt_oss(layers=24, experts=32), 20.91),
    "gpt-oss-120b": (gpt_oss(layers=36, experts=128), 116.83),
    "Llama-3.1-8B": (llama3(8.0, 32, 4096, 32, intermediate_size=14_336), 8.03),
    "Llama-3.1-70B": (llama3(8.0, 80, 8192, 64, intermediate_size=28_672), 70.55),
    "Llama-3.2-1B": (
        llama3(
            *(32.0, 16, 2048, 32), head_dim=64, intermediate_size=8192, tie_word_embeddings=True
        ),
        1.236,
    ),
    "Qwen2.5-0.5B": (
        plain(
            *("Qwen2ForCausalLM", 151_936, 24, 896),
            **heads(14, 2, rope_theta=1e6),
            intermediate_size=4864,
            tie_word_embeddings=True,
        ),
        0.494,
    ),
    "Qwen2.5-7B": (
        plain(
            *("Qwen2ForCausalLM", 152_064, 28, 3584),
            **heads(28, 4, rope_theta=1e6),
            intermediate_size=18_944,
            sliding_window=131_072,
            use_sliding_window=False,
        ),
        7.62,
    ),
    "Qwen2.5-72B": (
        plain(
            *("Qwen2ForCausalLM", 152_064, 80, 8192),
            **heads(64, 8, rope_theta=1e6),
            intermediate_size=29_568,
        ),
        72.7,
    ),
    "Qwen1.5-MoE-A2.7B": (
        plain(
            *("Qwen2MoeForCausalLM", 151_936, 24, 2048),
            **heads(16, 16, rope_theta=1e6),
            intermediate_size=5632,
            **experts(60, 4, 1408),
            shared_expert_intermediate_size=5632,
            norm_topk_prob=False,
        ),
        14.3,
    ),
    "Qwen2-57B-A14B": (
        plain(
            *("Qwen2MoeForCausalLM", 151_936, 28, 3584),
            **heads(28, 4, rope_theta=1e6),
            intermediate_size=18_944,
            **experts(64, 8, 2560),
            shared_expert_intermediate_size=20_480,
            norm_topk_prob=False,
        ),
        57.4,
    ),
    "Qwen3-0.6B": (
        qwen3(28, 1024, 16, 8, intermediate_size=3072, tie_word_embeddings=True),
        0.596,
    ),
    "Qwen3-8B": (qwen3(36, 4096, 32, 8, intermediate_size=12_288), 8.19),
    "Qwen3-32B": (qwen3(64, 5120, 64, 8, intermediate_size=25_600), 32.76),
    "Qwen3-30B-A3B": (
        qwen3(
            *(48, 2048, 32, 4),
            intermediate_size=6144,
            **experts(128, 8, 768),
            norm_topk_prob=True,
        ),
        30.5,
    ),
    "Qwen3-235B-A22B": (
        qwen3(
            *(94, 4096, 64, 4),
            intermediate_size=12_288,
            **experts(128, 8, 1536),
            norm_topk_prob=True,
        ),
        235.1,
    ),
    "Qwen3-Coder-480B-A35B": (
        qwen3(
            *(62, 6144, 96, 8),
            intermediate_size=8192,
            **experts(160, 8, 2560),
            norm_topk_prob=True,
            rope_theta=1e7,
            max_position_embeddings=262_144,
        ),
        480.2,
    ),
    "Mixtral-8x7B": (
        plain(
            *("MixtralForCausalLM", 32_000, 32, 4096),
            **heads(32, 8, rope_theta=1e6),
            intermediate_size=14_336,
            num_local_experts=8,
            num_experts_per_tok=2,
        ),
        46.7,
    ),
    "Mixtral-8x22B": (mixtral_8x22b(32_000), 140.6),
    "Mixtral-8x22B-Instruct": (mixtral_8x22b(32_768), 140.6),
    "OLMoE-1B-7B": (
        plain(
            *("OlmoeForCausalLM", 50_304, 16, 2048),
            **heads(16, 16, rope_theta=10_000.0),
            intermediate_size=1024,
            num_experts=64,
            num_experts_per_tok=8,
            norm_topk_prob=False,
        ),
        6.92,
    ),
    "Hy3-preview": (
        plain(
            *("HYV3ForCausalLM", 120_832, 80, 4096),
            model_type="hy_v3",
            **heads(64, 8, head_dim=128),
            intermediate_size=13_312,
            **experts(192, 8, 1536),
            expert_hidden_dim=1536,
            num_shared_experts=1,
            first_k_dense_replace=1,
            num_nextn_predict_layers=1,
            qk_norm=True,
            route_norm=True,
            moe_router_use_sigmoid=True,
            moe_router_enable_expert_bias=True,
            router_scaling_factor=2.826,
            rope_parameters={"rope_type": "default", "rope_theta": 11_158_840.0},
            max_position_embeddings=262_144,
            rms_norm_eps=1e-5,
        ),
        295.0,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters(name: str) -> None:
    hf, billions = PUBLISHED[name]
    shape = shape_of(describe(hf))
    assert shape.vocab_size is not None
    sizes = weight_map(family_of(hf), shape, shape.vocab_size).shapes.values()
    assert sum(map(math.prod, sizes)) / 1e9 == pytest.approx(billions, rel=0.005)
