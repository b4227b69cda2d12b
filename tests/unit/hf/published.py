"""Small random models in the layout of published checkpoints, written without the weight map.

All sizes that a wrong map could confuse differ: hidden, intermediate and heads * head_dim; query
groups and heads. The vocabulary size is a prime number, and no norm is 1.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

VOCABULARY = 37

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 44,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "intermediate_size": 52,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-3,
    "rope_theta": 300.0,
    "rope_scaling": None,
    "max_position_embeddings": 64,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "use_cache": True,
}
_NO_HEAD_DIM = {key: value for key, value in _COMMON.items() if key != "head_dim"}
_QWEN_MOE: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 28,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [1],
    "norm_topk_prob": True,
    "router_aux_loss_coef": 0.003,
    "output_router_logits": False,
}

_SIGMOID: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 28,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.75,
    "num_nextn_predict_layers": 0,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_moe": _COMMON
    | _QWEN_MOE
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": 4,
    },
    "qwen3": _COMMON | {"architectures": ["Qwen3ForCausalLM"], "attention_bias": False},
    "qwen2_moe": _COMMON
    | _QWEN_MOE
    | {
        "architectures": ["Qwen2MoeForCausalLM"],
        "norm_topk_prob": False,
        "shared_expert_intermediate_size": 36,
        "use_sliding_window": False,
        "sliding_window": 32,
    },
    "mixtral": _COMMON
    | {
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.002,
        "router_jitter_noise": 0.0,
        "sliding_window": None,
    },
    "olmoe": _NO_HEAD_DIM
    | {
        "architectures": ["OlmoeForCausalLM"],
        "hidden_size": 60,  # equal to heads * head_dim, because the config has no head_dim
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "norm_topk_prob": False,
        "router_aux_loss_coef": 0.02,
        "attention_bias": False,
        "clip_qkv": None,
        "pad_token_id": None,
        "eos_token_id": 1,
    },
    "deepseek_v3": _NO_HEAD_DIM
    | _SIGMOID
    | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "num_key_value_heads": 6,
        "q_lora_rank": 18,
        "kv_lora_rank": 14,
        "qk_nope_head_dim": 10,
        "qk_rope_head_dim": 6,
        "v_head_dim": 12,
        "n_group": 4,
        "topk_group": 2,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "rope_interleave": True,
        "attention_bias": False,
        "pad_token_id": None,
    },
    "qwen2": _NO_HEAD_DIM
    | {
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": 60,
        "use_sliding_window": False,
        "sliding_window": 32,
    },
    "llama": _COMMON
    | {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 48,  # transformers requires a multiple of the number of heads
        "attention_bias": False,
        "mlp_bias": False,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "rope_theta": 500_000.0,
        "max_position_embeddings": 131_072,
    },
    "glm4_moe": _COMMON
    | _SIGMOID
    | {
        "architectures": ["Glm4MoeForCausalLM"],
        "head_dim": 12,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
        "use_qk_norm": True,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 3,
    },
    "hy_v3": _COMMON
    | {
        "architectures": ["HYV3ForCausalLM"],
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 28,
        "num_shared_experts": 2,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "router_scaling_factor": 2.5,
        "attention_bias": False,
        "mlp_bias": False,
    },
    # config.json has no other key than intermediate_size for the width of the experts.
    "minimax_m2": _COMMON
    | {
        "architectures": ["MiniMaxM2ForCausalLM"],
        "head_dim": 12,
        "rotary_dim": 6,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "shared_intermediate_size": 0,
        "router_jitter_noise": 0.0,
        "use_mtp": True,
        "num_mtp_modules": 0,
    },
    "bailing_moe_v2": _COMMON
    | {
        "architectures": ["BailingMoeV2ForCausalLM"],
        "head_dim": 12,
        "partial_rotary_factor": 0.5,
        "use_qkv_bias": False,
        "use_bias": False,
        "use_qk_norm": True,
        "use_rmsnorm": True,
        "num_experts": 8,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 28,
        "num_shared_experts": 2,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.75,
        "score_function": "sigmoid",
        "router_dtype": "fp32",
        "moe_router_enable_expert_bias": True,
        "num_nextn_predict_layers": 0,
    },
    "ernie4_5_moe": _NO_HEAD_DIM
    | {
        "architectures": ["Ernie4_5_MoeForCausalLM"],
        "hidden_size": 60,
        "moe_num_experts": 8,
        "moe_k": 3,
        "moe_intermediate_size": 28,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": 3,
        "moe_layer_interval": 2,
        "moe_norm_min": 1e-12,
        "use_bias": False,
        "num_nextn_predict_layers": 0,
    },
}
_DELTA: dict[str, Any] = {
    **{key: value for key, value in _COMMON.items() if key != "intermediate_size"},
    "head_dim": 16,  # only a part of its channels is rotated
    "max_position_embeddings": 256,
    "partial_rotary_factor": 0.25,
    "attention_bias": False,
    "rms_norm_eps": 0.02,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 14,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 28,
    "shared_expert_intermediate_size": 36,
    "router_aux_loss_coef": 0.003,
    "output_router_logits": False,
}
CONFIGS["qwen3_next"] = _DELTA | {
    "architectures": ["Qwen3NextForCausalLM"],
    "intermediate_size": 52,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [1],
}
CONFIGS["qwen3_5_moe_text"] = _DELTA | {
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "attn_output_gate": True,
    "mtp_num_hidden_layers": 0,
}
# A window of 6 tokens, YaRN from 8 tokens on, and gate and up values that reach the limit.
CONFIGS["gpt_oss"] = _COMMON | {
    "architectures": ["GptOssForCausalLM"],
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "intermediate_size": 28,
    "attention_bias": True,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "swiglu_limit": 0.7,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        # the bounds are 0.5 and 2.5 channels, so rounding them would change the result
        "beta_fast": 0.7,
        "beta_slow": 0.07,
        "original_max_position_embeddings": 8,
        "truncate": False,
    },
    "max_position_embeddings": 256,
    "pad_token_id": None,
}
CONFIGS["qwen3_5_text"] = {
    **{k: v for k, v in _DELTA.items() if "expert" not in k and "router" not in k},
    "architectures": ["Qwen3_5ForCausalLM"],
    "attn_output_gate": True,
    "mtp_num_hidden_layers": 0,
    "intermediate_size": 52,
}
del CONFIGS["qwen3_5_text"]["moe_intermediate_size"]
CONFIGS["glm4_moe_lite"] = CONFIGS["deepseek_v3"] | {
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 3,
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
}
del CONFIGS["glm4_moe_lite"]["first_k_dense_replace"]


for _family, _settings in CONFIGS.items():
    _settings["model_type"] = _family


# Keys that vLLM needs and that transformers neither reads nor writes. An export adds them.
ADDED_KEYS: dict[str, dict[str, Any]] = {
    "hy_v3": {"expert_hidden_dim": 28, "first_k_dense_replace": 1},
    "glm4_moe_lite": {"first_k_dense_replace": 1},
}


def model_config(family: str, dtype: str = "float32", **changes: Any) -> dict[str, Any]:
    return CONFIGS[family] | {"torch_dtype": dtype} | changes


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The names and shapes of a model's published tensors."""
    hidden = config["hidden_size"]
    shapes: dict[str, tuple[int, ...]] = {
        _embedding(config): (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        start = f"model.layers.{layer}."
        shapes[start + "input_layernorm.weight"] = (hidden,)
        shapes[start + "post_attention_layernorm.weight"] = (hidden,)
        attention = _latent_attention if "kv_lora_rank" in config else _attention
        if config["model_type"] == "bailing_moe_v2":
            attention = _fused_attention
        if _is_delta_net(config, layer):
            attention = _delta_net
        parts = {**dict(attention(config)), **dict(_mlp(config, layer))}
        shapes |= {start + name: shape for name, shape in parts.items()}
    return shapes


DELTA_NETS = ("qwen3_next", "qwen3_5_moe_text", "qwen3_5_text")

Shapes = Iterator[tuple[str, tuple[int, ...]]]


def _attention(config: dict[str, Any]) -> Shapes:
    hidden = config["hidden_size"]
    width = config.get("head_dim", hidden // config["num_attention_heads"])
    queries = config["num_attention_heads"] * width
    keys = config["num_key_value_heads"] * width
    gates = queries if config["model_type"] in DELTA_NETS else 0
    for part, rows in (("q", queries + gates), ("k", keys), ("v", keys)):
        yield f"self_attn.{part}_proj.weight", (rows, hidden)
        biased = config["model_type"] in ("qwen2_moe", "qwen2")
        if biased or config.get("attention_bias"):
            yield f"self_attn.{part}_proj.bias", (rows,)
    yield "self_attn.o_proj.weight", (hidden, queries)
    if config["model_type"] == "gpt_oss":
        yield "self_attn.o_proj.bias", (hidden,)
        yield "self_attn.sinks", (config["num_attention_heads"],)
    if config["model_type"] in ("olmoe", "minimax_m2"):
        yield "self_attn.q_norm.weight", (queries,)
        yield "self_attn.k_norm.weight", (keys,)
    elif config["model_type"] in NORMED or config.get("use_qk_norm"):
        yield "self_attn.q_norm.weight", (width,)
        yield "self_attn.k_norm.weight", (width,)


NORMED = ("qwen3", "qwen3_moe", "hy_v3", *DELTA_NETS)


def _fused_attention(config: dict[str, Any]) -> Shapes:
    hidden, width = config["hidden_size"], config["head_dim"]
    heads, keys = config["num_attention_heads"], config["num_key_value_heads"]
    yield "attention.query_key_value.weight", ((heads + 2 * keys) * width, hidden)
    if config["use_qkv_bias"]:
        yield "attention.query_key_value.bias", ((heads + 2 * keys) * width,)
    yield "attention.dense.weight", (hidden, heads * width)
    if config["use_qk_norm"]:
        yield "attention.query_layernorm.weight", (width,)
        yield "attention.key_layernorm.weight", (width,)


def _embedding(config: dict[str, Any]) -> str:
    name = "word_embeddings" if config["model_type"] == "bailing_moe_v2" else "embed_tokens"
    return f"model.{name}.weight"


def _is_delta_net(config: dict[str, Any], layer: int) -> bool:
    return config.get("layer_types", {layer: ""})[layer] == "linear_attention"


def _delta_net(config: dict[str, Any]) -> Shapes:
    hidden = config["hidden_size"]
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    heads = config["linear_num_value_heads"]
    values = heads * config["linear_value_head_dim"]
    parts = {"qkv": 2 * keys + values, "z": values, "b": heads, "a": heads}
    if config["model_type"] == "qwen3_next":
        parts = {"qkvz": 2 * keys + 2 * values, "ba": 2 * heads}
    for part, rows in parts.items():
        yield f"linear_attn.in_proj_{part}.weight", (rows, hidden)
    channels, kernel = 2 * keys + values, config["linear_conv_kernel_dim"]
    yield "linear_attn.conv1d.weight", (channels, 1, kernel)
    yield "linear_attn.A_log", (heads,)
    yield "linear_attn.dt_bias", (heads,)
    yield "linear_attn.norm.weight", (config["linear_value_head_dim"],)
    yield "linear_attn.out_proj.weight", (hidden, values)


def _latent_attention(config: dict[str, Any]) -> Shapes:
    hidden, heads, latent = (
        config[key] for key in ("hidden_size", "num_attention_heads", "kv_lora_rank")
    )
    plain, rotated, values = (
        config[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    rank = config["q_lora_rank"]
    if rank is None:
        yield "self_attn.q_proj.weight", (heads * (plain + rotated), hidden)
    else:
        yield "self_attn.q_a_proj.weight", (rank, hidden)
        yield "self_attn.q_a_layernorm.weight", (rank,)
        yield "self_attn.q_b_proj.weight", (heads * (plain + rotated), rank)
    yield "self_attn.kv_a_proj_with_mqa.weight", (latent + rotated, hidden)
    yield "self_attn.kv_a_layernorm.weight", (latent,)
    yield "self_attn.kv_b_proj.weight", (heads * (plain + values), latent)
    yield "self_attn.o_proj.weight", (hidden, heads * values)


def _gated(start: str, hidden: int, width: int, names: tuple[str, ...] = ()) -> Shapes:
    shapes = ((width, hidden), (width, hidden), (hidden, width))
    names = names or ("gate_proj", "up_proj", "down_proj")
    return ((f"{start}{name}.weight", shape) for name, shape in zip(names, shapes))


def _is_dense(config: dict[str, Any], layer: int) -> bool:
    kinds = config.get("mlp_layer_types")
    return (
        config["model_type"] in ("qwen3", "qwen2", "llama", "qwen3_5_text")
        or layer in config.get("mlp_only_layers", ())
        or layer < config.get("first_k_dense_replace", 0)
        or (kinds is not None and kinds[layer] == "dense")
        or (layer + 1) % config.get("decoder_sparse_step", 1) != 0
        or (layer + 1) % config.get("moe_layer_interval", 1) != 0
        or layer < config.get("moe_layer_start_index", 0)
        or layer > config.get("moe_layer_end_index", layer)
    )


def _mlp(config: dict[str, Any], layer: int) -> Shapes:
    family, hidden = config["model_type"], config["hidden_size"]
    if _is_dense(config, layer):
        yield from _gated("mlp.", hidden, config["intermediate_size"])
        return
    width = config.get("moe_intermediate_size") or config["intermediate_size"]
    keys = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    (experts,) = (config[key] for key in keys if key in config)
    if family == "gpt_oss":  # gate and up alternate on the last axis
        yield "mlp.router.weight", (experts, hidden)
        yield "mlp.router.bias", (experts,)
        yield "mlp.experts.gate_up_proj", (experts, hidden, 2 * width)
        yield "mlp.experts.gate_up_proj_bias", (experts, 2 * width)
        yield "mlp.experts.down_proj", (experts, width, hidden)
        yield "mlp.experts.down_proj_bias", (experts, hidden)
        return
    by_numbers = family in ("mixtral", "minimax_m2")
    start = "block_sparse_moe." if by_numbers else "mlp."
    names = ("w1", "w3", "w2") if by_numbers else ()
    yield f"{start}{'router.' * (family == 'hy_v3')}gate.weight", (experts, hidden)
    if family == "hy_v3":
        yield "mlp.expert_bias", (experts,)
    elif family == "ernie4_5_moe":
        yield "mlp.moe_statics.e_score_correction_bias", (1, experts)
    elif family == "minimax_m2":
        yield f"{start}e_score_correction_bias", (experts,)
    elif family == "bailing_moe_v2":
        yield "mlp.gate.expert_bias", (experts,)
    elif "n_routed_experts" in config:
        yield "mlp.gate.e_score_correction_bias", (experts,)
    for expert in range(experts):
        yield from _gated(f"{start}experts.{expert}.", hidden, width, names)
    if family in ("qwen2_moe", *DELTA_NETS):
        shared = config["shared_expert_intermediate_size"]
        yield from _gated("mlp.shared_expert.", hidden, shared)
        yield "mlp.shared_expert_gate.weight", (1, hidden)
    for key, name in (
        ("n_shared_experts", "shared_experts"),
        ("moe_num_shared_experts", "shared_experts"),
        ("num_shared_experts", "shared_mlp" if family == "hy_v3" else "shared_experts"),
    ):
        if config.get(key):
            yield from _gated(f"mlp.{name}.", hidden, config[key] * width)


def random_tensors(config: dict[str, Any], seed: int) -> dict[str, Tensor]:
    """Weights with a standard deviation of 0.15, about 1 / sqrt(width). Weights of norms are near
    1, or near 0 where the family adds 1."""
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, config["torch_dtype"])
    tensors = {}
    for name, shape in tensor_shapes(config).items():
        noise = 0.15 * torch.randn(shape, generator=generator)
        # These tensors are published in fp32, whatever the other dtypes are.
        fp32 = name.endswith(("e_score_correction_bias", "expert_bias", "A_log", "dt_bias"))
        kind = torch.float32 if fp32 else dtype
        around_zero = config["model_type"] in DELTA_NETS and "linear_attn" not in name
        start = 1.0 if "norm" in name and not around_zero else 0.0
        # A convolution has only four values for each channel. With smaller values, queries and keys
        # would be pure noise.
        if "conv1d" in name:
            noise *= 4
        tensors[name] = (start + noise).to(kind)
    return tensors


def write_folder(
    path: Path, config: dict[str, Any], tensors: dict[str, Tensor], files: int = 3
) -> Path:
    """Write a folder in the published layout: config.json, `files` safetensors files, and their
    index."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    # puts parts of a layer into different files
    names = sorted(tensors, key=lambda name: name[::-1])
    if files == 1:
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
        return path
    weight_map = {}
    for number in range(files):
        file = f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        chosen = names[number::files]
        save_file({name: tensors[name] for name in chosen}, path / file, {"format": "pt"})
        weight_map |= dict.fromkeys(chosen, file)
    size = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


Variant = tuple[str, dict[str, Any]]  # a family and changes of its configuration


def variant_name(variant: Variant) -> str:
    return " ".join([variant[0], *(f"{key}={value}" for key, value in variant[1].items())])


def write_model(path: Path, family: str, seed: int, files: int = 3, **changes: Any) -> Path:
    config = model_config(family, **changes)
    return write_folder(path, config, random_tensors(config, seed), files)


def read_folder(path: Path) -> dict[str, Tensor]:
    """All tensors of a folder, read by the safetensors library."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        found = load_file(file)
        assert not tensors.keys() & found.keys()
        tensors |= found
    return tensors


def assert_same_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Check that all bits are equal, also the payload of NaN and the sign of zero."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        bits = [t.contiguous().reshape(-1).view(torch.uint8) for t in (found[name], tensor)]
        assert torch.equal(*bits), name
