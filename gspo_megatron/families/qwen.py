"""Qwen3MoeForCausalLM, Qwen3ForCausalLM, Qwen2MoeForCausalLM (Qwen1.5-MoE, Qwen2-57B-A14B) and
Qwen2ForCausalLM (Qwen2, Qwen2.5)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gspo_megatron.families import family as f


def read_pattern(hf: Mapping[str, Any]) -> list[bool]:
    """A layer has experts unless `mlp_only_layers` names it or `decoder_sparse_step` skips it."""
    dense = set(hf.get("mlp_only_layers") or ())
    step = hf.get("decoder_sparse_step", 1)
    return [
        layer not in dense and (layer + 1) % step == 0 for layer in range(hf["num_hidden_layers"])
    ]


def write_pattern(experts: list[bool]) -> dict[str, Any]:
    dense = [layer for layer, has_experts in enumerate(experts) if not has_experts]
    return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


_MOE_FIELDS = (
    *f.SIZES,
    f.Field("head_dim", "kv_channels", None),
    f.Field("num_experts", "num_moe_experts"),
    f.Field("num_experts_per_tok", "moe_router_topk"),
    f.Field("moe_intermediate_size", "moe_ffn_hidden_size"),
    f.Field("norm_topk_prob", "moe_router_pre_softmax", False, negated=True),
    f.Field("router_aux_loss_coef", "moe_aux_loss_coeff", 1e-3),
)
_QWEN3 = {"qk_layernorm": True, "add_qkv_bias": False}
_QWEN3_NAMES = {**f.EMBEDDINGS, **f.NORMS, **f.ATTENTION, **f.QK_NORMS, **f.DENSE}

QWEN2 = f.Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    fields=(*f.SIZES, f.key_value_heads(32), f.Field("head_dim", "kv_channels", None)),
    always={"qk_layernorm": False, "add_qkv_bias": True},
    names={**f.EMBEDDINGS, **f.NORMS, **f.ATTENTION, **f.ATTENTION_BIASES, **f.DENSE},
)
QWEN3 = f.Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    fields=(*f.SIZES, f.key_value_heads(32), f.Field("head_dim", "kv_channels", 128)),
    always=_QWEN3,
    only={"attention_bias": (False,)},
    names=_QWEN3_NAMES,
)
QWEN3_MOE = f.Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    fields=(*_MOE_FIELDS, f.key_value_heads(4)),
    spellings={"num_local_experts": "num_experts"},
    always=f.LINEAR_ROUTER | _QWEN3,
    only={"attention_bias": (False,)},
    read_pattern=read_pattern,
    write_pattern=write_pattern,
    names=_QWEN3_NAMES | f.ROUTER | f.EXPERTS,
)
QWEN2_MOE = f.Family(
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    fields=(
        *_MOE_FIELDS,
        f.key_value_heads(16),
        f.Field("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
        f.Field("qkv_bias", "add_qkv_bias", True),
    ),
    always={**f.LINEAR_ROUTER, "qk_layernorm": False, "moe_shared_expert_gate": True},
    read_pattern=read_pattern,
    write_pattern=write_pattern,
    names={
        **f.EMBEDDINGS,
        **f.NORMS,
        **f.ATTENTION,
        **f.ATTENTION_BIASES,
        **f.DENSE,
        **f.ROUTER,
        **f.EXPERTS,
        **f.GATED_SHARED_EXPERT,
    },
)
