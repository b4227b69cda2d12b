"""OlmoeForCausalLM: OLMoE-1B-7B, whose queries and keys are normalised over all heads together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gspo_megatron.errors import problem
from gspo_megatron.families import family as f


def _check(hf: Mapping[str, Any]) -> list[str]:
    """Refuse a head_dim other than hidden_size / num_attention_heads."""
    hidden, heads, width = (hf.get(k) for k in ("hidden_size", "num_attention_heads", "head_dim"))
    if width is None or width * heads == hidden:
        return []
    wrong = "not supported; allowed: hidden_size / num_attention_heads"
    return [problem("head_dim", width, wrong)]


FAMILY = f.Family(
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    fields=(
        *f.SIZES[:3],
        f.key_value_heads(None),
        # all layers have experts, and `intermediate_size` is the width of an expert
        f.Field("intermediate_size", "moe_ffn_hidden_size"),
        f.Field("rms_norm_eps", "layernorm_epsilon", 1e-5),
        f.Field("hidden_act", "activation_func", "silu"),
        f.Field("num_experts", "num_moe_experts"),
        f.Field("num_experts_per_tok", "moe_router_topk"),
        f.Field("norm_topk_prob", "moe_router_pre_softmax", False, negated=True),
        f.Field("router_aux_loss_coef", "moe_aux_loss_coeff", 1e-2),
    ),
    always={**f.LINEAR_ROUTER, "qk_layernorm": True, "add_qkv_bias": False},
    only={"attention_bias": (False,), "clip_qkv": (None,)},
    spellings={"num_local_experts": "num_experts"},
    check=_check,
    max_position_embeddings=4096,
    joint_qk_norm=True,
    names={**f.EMBEDDINGS, **f.NORMS, **f.ATTENTION, **f.QK_NORMS, **f.ROUTER, **f.EXPERTS},
)
