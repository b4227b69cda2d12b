"""Qwen2MoeForCausalLM: Qwen1.5-MoE-A2.7B and Qwen2-57B-A14B, with a gated shared expert."""

from __future__ import annotations

from gspo_megatron.config.families import family as f
from gspo_megatron.config.families import qwen_layers

FAMILY = f.Family(
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    fields=(
        *f.SIZES,
        f.Field("head_dim", "kv_channels", None),
        f.Field("num_experts", "num_moe_experts", also="num_local_experts"),
        f.Field("num_experts_per_tok", "moe_router_topk"),
        f.Field("moe_intermediate_size", "moe_ffn_hidden_size"),
        f.Field("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
        f.negated("norm_topk_prob", "moe_router_pre_softmax", default=False),
        f.Field("router_aux_loss_coef", "moe_aux_loss_coeff", 1e-3),
        f.Field("qkv_bias", "add_qkv_bias", True),
    ),
    always={**f.SOFTMAX_ROUTER, "qk_layernorm": False, "moe_shared_expert_gate": True},
    read_pattern=qwen_layers.read,
    write_pattern=qwen_layers.write,
    names={
        **f.EMBEDDINGS,
        **f.NORMS,
        **f.ATTENTION,
        **{f"{part}_bias": f"model.layers.{{layer}}.self_attn.{part}_proj.bias" for part in "qkv"},
        **f.DENSE,
        **f.ROUTER,
        **f.EXPERTS,
        "shared_router": "model.layers.{layer}.mlp.shared_expert_gate.weight",
        **{
            f"shared_{part}": f"model.layers.{{layer}}.mlp.shared_expert.{part}_proj.weight"
            for part in ("gate", "up", "down")
        },
    },
)
