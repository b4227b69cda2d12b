"""Qwen3MoeForCausalLM: Qwen3-30B-A3B, Qwen3-235B-A22B and their kin."""

from __future__ import annotations

from gspo_megatron.config.families import family as f
from gspo_megatron.config.families import qwen_layers

FAMILY = f.Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    fields=(
        *f.SIZES,
        f.Field("head_dim", "kv_channels", None),
        f.Field("num_experts", "num_moe_experts", also="num_local_experts"),
        f.Field("num_experts_per_tok", "moe_router_topk"),
        f.Field("moe_intermediate_size", "moe_ffn_hidden_size"),
        f.negated("norm_topk_prob", "moe_router_pre_softmax", default=False),
        f.Field("router_aux_loss_coef", "moe_aux_loss_coeff", 1e-3),
    ),
    always={**f.SOFTMAX_ROUTER, "qk_layernorm": True, "add_qkv_bias": False},
    only={"attention_bias": (False,)},
    read_pattern=qwen_layers.read,
    write_pattern=qwen_layers.write,
    names={**f.EMBEDDINGS, **f.NORMS, **f.ATTENTION, **f.QK_NORMS, **f.DENSE, **f.ROUTER}
    | f.EXPERTS,
)
