"""Qwen3NextForCausalLM, and the language models of Qwen3.5: Qwen3_5MoeForCausalLM and
Qwen3_5ForCausalLM. Three of four layers have a gated delta net in place of attention. The attention
of the fourth layer has an output gate.

Qwen3.5 is published as a vision-language model. Only its language model is trained, and exports are
text models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gspo_megatron.errors import problem
from gspo_megatron.families import family as f
from gspo_megatron.families import qwen
from gspo_megatron.families.model_shape import DELTA_NET_SIZES, delta_net_pattern
from gspo_megatron.families.rope import RopeKinds

FULL, LINEAR = "full_attention", "linear_attention"
# These keys of config.json have the names of TransformerConfig, with the same defaults.
_DELTA_NET_FIELDS = tuple(f.Field(name, name, size) for name, size in DELTA_NET_SIZES.items())
_EXPERT_FIELDS = (
    f.Field("num_experts", "num_moe_experts"),
    f.Field("num_experts_per_tok", "moe_router_topk"),
    f.Field("moe_intermediate_size", "moe_ffn_hidden_size"),
    f.Field("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
    f.Field("router_aux_loss_coef", "moe_aux_loss_coeff", 1e-3),
)
_ALWAYS: dict[str, Any] = {
    "experimental_attention_variant": "gated_delta_net",
    "attention_output_gate": True,
    "layernorm_zero_centered_gamma": True,
    "qk_layernorm": True,
    "add_qkv_bias": False,
}
_ROUTER: dict[str, Any] = {**f.LINEAR_ROUTER, "moe_shared_expert_gate": True}


def _check(hf: Mapping[str, Any]) -> list[str]:
    problems = []
    kinds, count = hf.get("layer_types"), hf.get("num_hidden_layers")
    if kinds is not None and (not isinstance(kinds, list) or len(kinds) != count):
        wrong = f"must be a list with the kind of each of the {count} layers"
        problems.append(problem("layer_types", kinds, wrong))
    keys, values = hf.get("linear_num_key_heads", 16), hf.get("linear_num_value_heads", 32)
    if type(keys) is type(values) is int and keys and values % keys:
        wrong = f"must be a multiple of linear_num_key_heads = {keys}"
        problems.append(problem("linear_num_value_heads", values, wrong))
    return problems


def _read_rest(hf: Mapping[str, Any]) -> dict[str, Any]:
    # As in transformers, `full_attention_interval` counts only if `layer_types` is missing.
    if (kinds := hf.get("layer_types")) is not None:
        flags = [int(kind == LINEAR) for kind in kinds]
    else:
        flags = delta_net_pattern(hf.get("full_attention_interval", 4), hf["num_hidden_layers"])
    # If an interval gives the same flags, the interval is returned, because it stays right if the
    # number of layers is reduced.
    intervals = (n for n in range(1, len(flags) + 1) if delta_net_pattern(n, len(flags)) == flags)
    return {"linear_attention_freq": next(intervals, flags)}


def _write_rest(megatron: Mapping[str, Any]) -> dict[str, Any]:
    pattern = delta_net_pattern(megatron.get("linear_attention_freq"), megatron["num_layers"])
    return {"layer_types": [LINEAR if flag else FULL for flag in pattern]}


_DELTA_NET = f.LAYER + "linear_attn."
_IN_NAMES = {f"in_{part}": f"{_DELTA_NET}in_proj_{part}.weight" for part in ("qkv", "z", "b", "a")}
_NAMES = {
    **f.EMBEDDINGS,
    **f.NORMS,
    **f.ATTENTION,
    **f.QK_NORMS,
    "conv": _DELTA_NET + "conv1d.weight",
    "decay": _DELTA_NET + "A_log",
    "decay_bias": _DELTA_NET + "dt_bias",
    "delta_norm": _DELTA_NET + "norm.weight",
    "delta_out": _DELTA_NET + "out_proj.weight",
}
_EXPERT_NAMES = {
    **f.ROUTER,
    **f.EXPERTS,
    **f.GATED_SHARED_EXPERT,
}

# vLLM imports the vision model, even if the folder has the language model alone.
_NO_CPU_SERVERS = "need torchvision for this family, and were not tried with it"
QWEN3_NEXT = f.Family(
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    fields=(
        *f.SIZES,
        f.key_value_heads(2),
        f.Field("head_dim", "kv_channels", 256),
        *_DELTA_NET_FIELDS,
        *_EXPERT_FIELDS,
        f.Field("norm_topk_prob", "moe_router_pre_softmax", True, negated=True),
    ),
    always=_ALWAYS | _ROUTER,
    only={"attention_bias": (False,)},
    rope=RopeKinds(percent=0.25),
    layer_types=(FULL, LINEAR),
    read_pattern=qwen.read_pattern,
    write_pattern=qwen.write_pattern,
    check=_check,
    read_rest=_read_rest,
    write_rest=_write_rest,
    unread_starts=("mtp.",),
    names={
        **_NAMES,
        **_EXPERT_NAMES,
        **f.DENSE,
        # `in_qkvz` has q, k, v and z of each key head. `in_ba` has b and a of each key head.
        "in_qkvz": _DELTA_NET + "in_proj_qkvz.weight",
        "in_ba": _DELTA_NET + "in_proj_ba.weight",
    },
)

QWEN3_5_MOE = f.Family(
    model_type="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    no_cpu_servers=_NO_CPU_SERVERS,
    vision_model_type="qwen3_5_moe",
    fields=(
        *(each for each in f.SIZES if each.hf != "intermediate_size"),
        f.key_value_heads(2),
        f.Field("head_dim", "kv_channels", 256),
        *_DELTA_NET_FIELDS,
        *_EXPERT_FIELDS,
    ),
    always={**_ALWAYS, **_ROUTER, "moe_router_pre_softmax": False},
    only={"attention_bias": (False,), "attn_output_gate": (True,)},
    rope=RopeKinds(percent=0.25),
    layer_types=(FULL, LINEAR),
    check=_check,
    read_rest=_read_rest,
    write_rest=_write_rest,
    next_token_layers="mtp_num_hidden_layers",
    unread_starts=("mtp.", "model.visual."),
    names={
        **_NAMES,
        **_EXPERT_NAMES,
        **_IN_NAMES,
        # published files have all experts of a layer in one tensor, transformers' files do not
        "experts_gate_up": f.LAYER + "mlp.experts.gate_up_proj",
        "experts_down": f.LAYER + "mlp.experts.down_proj",
    },
)

QWEN3_5 = replace(
    QWEN3_5_MOE,
    model_type="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    # transformers' class of preference models. `score_architecture` also reads images there.
    other_classes=("Qwen3_5TextForSequenceClassification",),
    no_cpu_servers=_NO_CPU_SERVERS,
    vision_model_type="qwen3_5",
    fields=(
        *f.SIZES,
        f.key_value_heads(4),
        f.Field("head_dim", "kv_channels", 256),
        *_DELTA_NET_FIELDS,
    ),
    always=_ALWAYS,
    names={**_NAMES, **_IN_NAMES, **f.DENSE},
)
