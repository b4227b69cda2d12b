"""BailingMoeV2ForCausalLM: Ling 2 and Ring 2. The family has the router of DeepSeek-V3. The files
of its models have queries, keys and values in one matrix. transformers has no class for this
family; the published folders contain such a class.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gspo_megatron.errors import problem
from gspo_megatron.families import family as f
from gspo_megatron.families import sigmoid_router as r
from gspo_megatron.families.rope import RopeKinds

_ATTENTION = f.LAYER + "attention."
_GROUPS = r.Groups(count=8, chosen=4, topk=8, experts="num_experts")


def _check(hf: Mapping[str, Any]) -> list[str]:
    """Refuse shared experts whose width differs from the width of the routed experts. The code in
    the published folders ignores the width of shared experts in config.json."""
    shared, width = hf.get("moe_shared_expert_intermediate_size"), hf.get("moe_intermediate_size")
    problems = _GROUPS.problems(hf)
    if shared not in (None, width):
        wrong = f"not supported; allowed: moe_intermediate_size ({width})"
        problems.append(problem("moe_shared_expert_intermediate_size", shared, wrong))
    return problems


FAMILY = f.Family(
    model_type="bailing_moe_v2",
    other_model_types=("bailing_moe",),  # in the published folders
    architecture="BailingMoeV2ForCausalLM",
    normalizes=False,
    no_servers="need a class for its config.json, which transformers does not have",
    fields=(
        *f.SIZES,
        f.key_value_heads(4),
        f.Field("head_dim", "kv_channels", 128),
        f.Field("use_qkv_bias", "add_qkv_bias", False),
        f.Field("use_qk_norm", "qk_layernorm", True),
        f.Field("num_experts", "num_moe_experts"),
        f.Field("num_experts_per_tok", "moe_router_topk", 8),
        f.Field("moe_intermediate_size", "moe_ffn_hidden_size"),
        f.Field("routed_scaling_factor", "moe_router_topk_scaling_factor", 1.0),
    ),
    always=r.ALWAYS,
    # vLLM needs most of these keys: it assumes other values if they are missing.
    only={
        "use_bias": (False,),
        "use_rmsnorm": (True,),
        "norm_topk_prob": (True,),
        "score_function": ("sigmoid",),
        "moe_router_enable_expert_bias": (True,),
        "router_dtype": ("fp32",),
        "embedding_dropout": (0.0,),
        "output_dropout": (0.0,),
    },
    spellings={"num_local_experts": "num_experts"},
    next_token_layers="num_nextn_predict_layers",
    # Ling-1T has the number of rotated channels, the other models the share
    rope=RopeKinds(base=600_000.0, percent=1.0, width_key="rotary_dim", writes_width=False),
    max_position_embeddings=32_768,
    read_pattern=r.dense_first(1),
    write_pattern=r.write_dense_first,
    check=_check,
    read_rest=lambda hf: r.read_shared(hf, "num_shared_experts") | _GROUPS.read(hf),
    write_rest=lambda megatron: {
        **r.write_groups(megatron),
        **r.write_shared(megatron, "num_shared_experts"),
    },
    names={
        **f.EMBEDDINGS,
        "embedding": "model.word_embeddings.weight",
        **f.NORMS,
        "qkv": _ATTENTION + "query_key_value.weight",
        "qkv_bias": _ATTENTION + "query_key_value.bias",
        "o": _ATTENTION + "dense.weight",
        "q_norm": _ATTENTION + "query_layernorm.weight",
        "k_norm": _ATTENTION + "key_layernorm.weight",
        **f.DENSE,
        **f.ROUTER,
        "router_bias": f.LAYER + "mlp.gate.expert_bias",
        **f.EXPERTS,
        **f.shared_experts("shared_experts"),
    },
)
