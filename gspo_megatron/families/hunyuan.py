"""HYV3ForCausalLM: Hunyuan 3. It has a sigmoid router. Some of its keys in config.json have names
that no other family has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gspo_megatron.families import family as f
from gspo_megatron.families import sigmoid_router as r
from gspo_megatron.families.rope import RopeKinds


def _write_rest(megatron: Mapping[str, Any]) -> dict[str, Any]:
    # vLLM reads the width of an expert from this key.
    width = {"expert_hidden_dim": megatron.get("moe_ffn_hidden_size")}
    return r.write_shared(megatron, "num_shared_experts") | width


FAMILY = f.Family(
    model_type="hy_v3",
    architecture="HYV3ForCausalLM",
    fields=(
        *f.sizes(1e-5),
        f.key_value_heads(8),
        f.Field("head_dim", "kv_channels", 128),
        f.Field("num_experts", "num_moe_experts"),
        f.Field("num_experts_per_tok", "moe_router_topk", 8),
        f.Field("moe_intermediate_size", "moe_ffn_hidden_size"),
        f.Field("router_scaling_factor", "moe_router_topk_scaling_factor", 2.826),
    ),
    always={**r.ALWAYS, "qk_layernorm": True, "add_qkv_bias": False},
    only={"attention_bias": (False,), "mlp_bias": (False,)},
    spellings={
        "num_local_experts": "num_experts",
        "num_mtp_layers": "num_nextn_predict_layers",
    },
    next_token_layers="num_nextn_predict_layers",
    rope=RopeKinds(base=11_158_840.0),
    max_position_embeddings=131_072,
    vllm_keys=("expert_hidden_dim", "first_k_dense_replace"),
    read_pattern=r.dense_first(1, has_types=True),
    write_pattern=r.write_layer_types,
    check=r.layer_problems,
    read_rest=lambda hf: r.read_shared(hf, "num_shared_experts"),
    write_rest=_write_rest,
    names={
        **f.EMBEDDINGS,
        **f.NORMS,
        **f.ATTENTION,
        **f.QK_NORMS,
        **f.DENSE,
        "router": f.LAYER + "mlp.router.gate.weight",
        "router_bias": f.LAYER + "mlp.expert_bias",
        **f.EXPERTS,
        **f.shared_experts("shared_mlp"),
    },
)
