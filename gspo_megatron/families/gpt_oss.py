"""GptOssForCausalLM: gpt-oss-20b and 120b. These models have sliding windows in every second layer,
attention sinks, biases in all linear layers, experts with a clamped activation and an offset, and
YaRN. Published files have experts in MXFP4. Files that transformers writes have bf16 experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gspo_megatron.errors import problem
from gspo_megatron.families import family as f
from gspo_megatron.families.model_shape import windows_in_layers
from gspo_megatron.families.rope import DEFAULT, YARN, RopeKinds

_MLP = f.LAYER + "mlp."
_SLIDING, _FULL = "sliding_attention", "full_attention"
_WINDOW = 128  # the window if config.json has none


def _check(hf: Mapping[str, Any]) -> list[str]:
    problems = []
    count, window = hf.get("num_hidden_layers"), hf.get("sliding_window", _WINDOW)
    kinds = hf.get("layer_types")
    fits = kinds is None or (isinstance(kinds, list) and len(kinds) == count)
    if not fits or not set(kinds or ()) <= {_SLIDING, _FULL}:
        wrong = f"must be {_SLIDING} or {_FULL} for each of the {count} layers"
        problems.append(problem("layer_types", kinds, wrong))
    elif (kinds is None or _SLIDING in kinds) and (type(window) is not int or window < 1):
        wrong = f"must be an integer from 1, for the layers with {_SLIDING}"
        problems.append(problem("sliding_window", window, wrong))
    return problems


def _read_windows(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of TransformerConfig for windows. A query sees `sliding_window` keys, including
    its own key. Megatron-Core counts only the keys before it. If config.json has no `layer_types`,
    the layers 2, 4, ... have no window."""
    kinds = hf.get("layer_types")
    if kinds is not None and _SLIDING not in kinds:
        return {}
    frequency: int | list[int] = 2
    if kinds is not None:
        flags = [int(kind == _SLIDING) for kind in kinds]
        if flags != [int(layer % 2 == 0) for layer in range(len(kinds))]:
            frequency = flags
    before = hf.get("sliding_window", _WINDOW) - 1
    return {"window_size": [before, 0], "window_attn_skip_freq": frequency}


def _write_windows(megatron: Mapping[str, Any]) -> dict[str, Any]:
    windows = windows_in_layers(megatron, megatron["num_layers"])
    return {
        "sliding_window": max((each for each in windows if each is not None), default=_WINDOW),
        "layer_types": [_FULL if each is None else _SLIDING for each in windows],
    }


FAMILY = f.Family(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    no_cpu_servers="fail with its sinks in fp32, and sample with other probabilities in bf16",
    fields=(
        *f.SIZES[:3],
        f.key_value_heads(8),
        # All layers have experts, so this field is the width of an expert.
        f.Field("intermediate_size", "moe_ffn_hidden_size"),
        f.Field("rms_norm_eps", "layernorm_epsilon", 1e-5),
        f.Field("head_dim", "kv_channels", 64),
        f.Field("num_local_experts", "num_moe_experts"),
        f.Field("num_experts_per_tok", "moe_router_topk", 4),
        f.Field("swiglu_limit", "activation_func_clamp_value", 7.0),
    ),
    always={
        **f.LINEAR_ROUTER,
        # Published files have a coefficient of 0.9, but also `output_router_logits` = false. Then
        # transformers does not add this loss.
        "moe_aux_loss_coeff": 0.0,
        "moe_router_pre_softmax": False,
        "qk_layernorm": False,
        "add_qkv_bias": True,
        "add_bias_linear": True,
        "softmax_type": "learnable",
        "activation_func": "quick_gelu",
        "glu_linear_offset": 1.0,
    },
    only={"hidden_act": ("silu",), "attention_bias": (True,), "swiglu_alpha": (1.702,)},
    spellings={"num_experts": "num_local_experts"},
    quantizations=(f.MXFP4,),
    has_windows=True,
    check=_check,
    read_rest=_read_windows,
    write_rest=_write_windows,
    rope=RopeKinds(
        (DEFAULT, YARN),
        base=150_000.0,
        unnamed={
            "rope_type": YARN,
            "factor": 32.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        latent=False,
    ),
    max_position_embeddings=131_072,
    names={
        **f.EMBEDDINGS,
        **f.NORMS,
        **f.ATTENTION,
        **f.ATTENTION_BIASES,
        "sinks": f.LAYER + "self_attn.sinks",
        "router": _MLP + "router.weight",
        "router_linear_bias": _MLP + "router.bias",
        "interleaved_gate_up": _MLP + "experts.gate_up_proj",
        "interleaved_gate_up_bias": _MLP + "experts.gate_up_proj_bias",
        "transposed_down": _MLP + "experts.down_proj",
        "down_bias": _MLP + "experts.down_proj_bias",
    },
)
