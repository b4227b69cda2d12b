"""Glm4MoeForCausalLM (GLM-4.5 to 4.7) and Glm4MoeLiteForCausalLM (GLM-4.7-Flash)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gspo_megatron.families import deepseek_v3
from gspo_megatron.families import family as f
from gspo_megatron.families import sigmoid_router as r
from gspo_megatron.families.rope import RopeKinds

_GROUPS = r.Groups(count=1, chosen=1, topk=8)
_LITE_GROUPS = r.Groups(count=1, chosen=1, topk=4)


def _write_rest(megatron: Mapping[str, Any]) -> dict[str, Any]:
    return r.write_groups(megatron) | r.write_shared(megatron, "n_shared_experts")


GLM4_MOE = f.Family(
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    fields=(
        *f.sizes(1e-5),
        f.key_value_heads(8),
        f.Field("head_dim", "kv_channels", None),
        f.Field("attention_bias", "add_qkv_bias", False),
        f.Field("use_qk_norm", "qk_layernorm", False),
        *r.fields(topk=8, scaling=1.0),
    ),
    always=r.ALWAYS,
    only={"norm_topk_prob": (True,)},
    spellings={
        "num_local_experts": "n_routed_experts",
        "num_mtp_layers": "num_nextn_predict_layers",
    },
    next_token_layers="num_nextn_predict_layers",
    rope=RopeKinds(percent=0.5),
    max_position_embeddings=131_072,
    read_pattern=r.dense_first(1),
    write_pattern=r.write_dense_first,
    check=_GROUPS.problems,
    read_rest=lambda hf: r.read_shared(hf, "n_shared_experts") | _GROUPS.read(hf),
    write_rest=_write_rest,
    names={
        **f.EMBEDDINGS,
        **f.NORMS,
        **f.ATTENTION,
        **f.ATTENTION_BIASES,
        **f.QK_NORMS,
        **f.DENSE,
        **f.ROUTER,
        "router_bias": f.LAYER + "mlp.gate.e_score_correction_bias",
        **f.EXPERTS,
        **f.shared_experts("shared_experts"),
    },
)

# Latent attention as in DeepSeek-V3, with other defaults.
GLM4_MOE_LITE = replace(
    deepseek_v3.FAMILY,
    model_type="glm4_moe_lite",
    architecture="Glm4MoeLiteForCausalLM",
    fields=(
        *f.sizes(1e-5),
        *deepseek_v3.latent_fields(768, 192, 256),
        *r.fields(topk=4, scaling=1.8),
    ),
    max_position_embeddings=202_752,
    vllm_keys=("first_k_dense_replace",),
    other_model_types=(),
    read_pattern=r.dense_first(1, has_types=True),
    write_pattern=r.write_layer_types,
    check=deepseek_v3.check_latent(_LITE_GROUPS, 20),
    read_rest=lambda hf: r.read_shared(hf, "n_shared_experts") | _LITE_GROUPS.read(hf),
)
