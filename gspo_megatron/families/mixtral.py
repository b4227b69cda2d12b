"""MixtralForCausalLM: Mixtral-8x7B and 8x22B."""

from __future__ import annotations

from gspo_megatron.families import family as f
from gspo_megatron.families.rope import RopeKinds

_MOE = f.LAYER + "block_sparse_moe."

FAMILY = f.Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    fields=(
        *f.SIZES[:3],
        f.key_value_heads(8),
        # all layers have experts, and `intermediate_size` is the width of an expert
        f.Field("intermediate_size", "moe_ffn_hidden_size"),
        f.Field("rms_norm_eps", "layernorm_epsilon", 1e-5),
        f.Field("hidden_act", "activation_func", "silu"),
        f.Field("head_dim", "kv_channels", None),
        f.Field("num_local_experts", "num_moe_experts"),
        f.Field("num_experts_per_tok", "moe_router_topk"),
        f.Field("router_aux_loss_coef", "moe_aux_loss_coeff", 1e-3),
    ),
    always={
        **f.LINEAR_ROUTER,
        "qk_layernorm": False,
        "add_qkv_bias": False,
        "moe_router_pre_softmax": False,
    },
    only={"router_jitter_noise": (0.0,), "sliding_window": (None,)},
    spellings={"num_experts": "num_local_experts"},
    rope=RopeKinds(base=1_000_000.0),
    max_position_embeddings=131_072,
    names={
        **f.EMBEDDINGS,
        **f.NORMS,
        **f.ATTENTION,
        "router": _MOE + "gate.weight",
        "expert_gate": _MOE + "experts.{expert}.w1.weight",
        "expert_up": _MOE + "experts.{expert}.w3.weight",
        "expert_down": _MOE + "experts.{expert}.w2.weight",
    },
)
