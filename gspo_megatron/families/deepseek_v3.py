"""DeepseekV3ForCausalLM: DeepSeek-V3 and R1, Kimi-K2, Moonlight. They have latent attention, a
sigmoid router with a bias, dense first layers, and YaRN. The layers that predict further tokens
(MTP) are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gspo_megatron.errors import problem
from gspo_megatron.families import family as f
from gspo_megatron.families import sigmoid_router as r
from gspo_megatron.families.rope import DEFAULT, YARN, RopeKinds

_ATTENTION = f.LAYER + "self_attn."
_GROUPS = r.Groups(count=8, chosen=4, topk=8)


def check_latent(groups: r.Groups, default_heads: int) -> Callable[[Mapping[str, Any]], list[str]]:
    """Return a function that checks several keys together. default_heads: the default of
    num_key_value_heads."""

    def check(hf: Mapping[str, Any]) -> list[str]:
        problems = groups.problems(hf) + r.layer_problems(hf)
        heads = hf.get("num_attention_heads")
        key_value_heads = hf.get("num_key_value_heads", default_heads)
        if key_value_heads not in (None, heads):
            wrong = f"not supported; allowed: {heads}"
            problems.append(problem("num_key_value_heads", key_value_heads, wrong))
        rope_width, width = hf.get("qk_rope_head_dim", 64), hf.get("head_dim")
        # transformers computes the rotary frequencies from head_dim
        if width not in (None, rope_width):
            wrong = f"not supported; allowed: qk_rope_head_dim ({rope_width})"
            problems.append(problem("head_dim", width, wrong))
        return problems

    return check


def latent_fields(query: int, plain: int, values: int) -> tuple[f.Field, ...]:
    """The fields for the widths of latent attention. The arguments are the defaults of q_lora_rank,
    qk_nope_head_dim and v_head_dim, which config.json may lack."""
    return (
        f.Field("q_lora_rank", "q_lora_rank", query, nullable=True),
        f.Field("kv_lora_rank", "kv_lora_rank", 512),
        f.Field("qk_nope_head_dim", "qk_head_dim", plain),
        f.Field("qk_rope_head_dim", "qk_pos_emb_head_dim", 64),
        f.Field("v_head_dim", "v_head_dim", values),
    )


def write_rest(megatron: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of config.json that are made of several fields of TransformerConfig."""
    return {
        **r.write_groups(megatron),
        **r.write_shared(megatron, "n_shared_experts"),
        "q_lora_rank": megatron.get("q_lora_rank"),
        "num_key_value_heads": megatron["num_attention_heads"],
    }


FAMILY = f.Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    other_model_types=("kimi_k2",),
    renamed_types=("kimi_k2",),
    fields=(*f.SIZES, *latent_fields(1536, 128, 128), *r.fields(topk=8, scaling=2.5)),
    always={
        **r.ALWAYS,
        "multi_latent_attention": True,
        "rope_type": "rope",
        "qk_layernorm": True,
        "add_qkv_bias": False,
    },
    only={
        "attention_bias": (False,),
        "norm_topk_prob": (True,),
        "rope_interleave": (True,),
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
        "moe_layer_freq": (1,),
    },
    spellings={
        "num_local_experts": "n_routed_experts",
        "num_mtp_layers": "num_nextn_predict_layers",
    },
    next_token_layers="num_nextn_predict_layers",
    rope=RopeKinds((DEFAULT, YARN)),
    max_position_embeddings=4096,
    vllm_keys=("topk_method",),
    read_pattern=r.dense_first(3),
    write_pattern=r.write_dense_first,
    check=check_latent(_GROUPS, 128),
    read_rest=lambda hf: r.read_shared(hf, "n_shared_experts") | _GROUPS.read(hf),
    write_rest=write_rest,
    names={
        **f.EMBEDDINGS,
        **f.NORMS,
        "q": _ATTENTION + "q_proj.weight",
        "q_down": _ATTENTION + "q_a_proj.weight",
        "q_norm": _ATTENTION + "q_a_layernorm.weight",
        "q_up": _ATTENTION + "q_b_proj.weight",
        "kv_down": _ATTENTION + "kv_a_proj_with_mqa.weight",
        "kv_norm": _ATTENTION + "kv_a_layernorm.weight",
        "kv_up": _ATTENTION + "kv_b_proj.weight",
        "o": _ATTENTION + "o_proj.weight",
        **f.DENSE,
        **f.ROUTER,
        "router_bias": f.LAYER + "mlp.gate.e_score_correction_bias",
        **f.EXPERTS,
        **f.shared_experts("shared_experts"),
    },
)
