"""MiniMaxM2ForCausalLM: MiniMax-M2 to M2.7. Queries and keys are normalised over all heads
together. Rotary positions cover a part of each head. All layers have experts.
"""

from __future__ import annotations

from gspo_megatron.families import family as f
from gspo_megatron.families import sigmoid_router as r
from gspo_megatron.families.rope import RopeKinds

_MLP = f.LAYER + "block_sparse_moe."

FAMILY = f.Family(
    model_type="minimax_m2",
    architecture="MiniMaxM2ForCausalLM",
    no_cpu_servers="ignore the bias of a router without groups",
    fields=(
        *f.SIZES[:3],
        f.key_value_heads(8),
        f.Field("head_dim", "kv_channels", 128),
        f.Field("intermediate_size", "moe_ffn_hidden_size"),
        *f.SIZES[4:],
        f.Field("num_local_experts", "num_moe_experts"),
        f.Field("num_experts_per_tok", "moe_router_topk", 8),
    ),
    always={**r.ALWAYS, "qk_layernorm": True, "add_qkv_bias": False},
    only={
        "scoring_func": ("sigmoid",),
        "use_routing_bias": (True,),
        "use_qk_norm": (True,),
        "qk_norm_type": ("per_layer",),  # each layer has one norm, instead of one for each head
        "shared_intermediate_size": (0,),
        "router_jitter_noise": (0.0,),
    },
    spellings={"num_experts": "num_local_experts"},
    next_token_layers="num_mtp_modules",
    rope=RopeKinds(base=5e6, percent=1.0, width_key="rotary_dim"),
    max_position_embeddings=196_608,
    joint_qk_norm=True,
    names={
        **f.EMBEDDINGS,
        **f.NORMS,
        **f.ATTENTION,
        **f.QK_NORMS,
        "router": _MLP + "gate.weight",
        "router_bias": _MLP + "e_score_correction_bias",
        **{
            f"expert_{part}": f"{_MLP}experts.{{expert}}.{name}.weight"
            for part, name in zip(f.MLP, ("w1", "w3", "w2"))
        },
    },
)
