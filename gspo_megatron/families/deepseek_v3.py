"""DeepseekV3ForCausalLM: latent attention, sigmoid router with a bias, first layers dense.

Without the extension of its context (YaRN), its FP8 weights and the layers for several next tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gspo_megatron.families import family as f

_ATTENTION = "model.layers.{layer}.self_attn."
_MLP = "model.layers.{layer}.mlp."


def _write_dense_first(experts: list[bool]) -> dict[str, Any] | None:
    dense = experts.index(True) if True in experts else len(experts)
    return {"first_k_dense_replace": dense} if all(experts[dense:]) else None


def _check(hf: Mapping[str, Any]) -> list[str]:
    """What several keys must satisfy together."""
    problems = []
    groups = hf.get("n_group", 8)
    chosen, topk = hf.get("topk_group", 4), hf.get("num_experts_per_tok", 8)
    if groups not in (None, 1) and topk != 2 * chosen:
        # both take the best two experts of each group for its score, but Megatron-Core calls them
        # topk / topk_group
        wrong = f"not supported with topk_group = {chosen}; legal: {2 * chosen}, or n_group = 1"
        problems.append(f"num_experts_per_tok = {topk}: {wrong}")
    heads = hf.get("num_attention_heads")
    given = hf.get("num_key_value_heads", 128)
    if given not in (None, heads):
        problems.append(f"num_key_value_heads = {given}: not supported; legal: {heads}")
    rotated, width = hf.get("qk_rope_head_dim", 64), hf.get("head_dim")
    if width not in (None, rotated):  # transformers takes the rotary frequencies from it
        wrong = f"not supported; legal: qk_rope_head_dim ({rotated})"
        problems.append(f"head_dim = {width}: {wrong}")
    return problems


def _read_rest(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The shared experts as one, and the groups: experts are chosen among those of the best."""
    width = hf.get("n_shared_experts", 1) * hf.get("moe_intermediate_size", 0)
    found = {"moe_shared_expert_intermediate_size": width or None}
    groups = hf.get("n_group", 8)
    if groups in (None, 1):
        return found
    topk = hf.get("topk_group", 4)
    return found | {"moe_router_num_groups": groups, "moe_router_group_topk": topk}


def _write_rest(megatron: Mapping[str, Any]) -> dict[str, Any]:
    shared = megatron.get("moe_shared_expert_intermediate_size") or 0
    return {
        "n_group": megatron.get("moe_router_num_groups") or 1,
        "topk_group": megatron.get("moe_router_group_topk") or 1,
        "n_shared_experts": shared // (megatron.get("moe_ffn_hidden_size") or 1),
        "q_lora_rank": megatron.get("q_lora_rank"),
        "num_key_value_heads": megatron["num_attention_heads"],
    }


FAMILY = f.Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    fields=(
        *f.SIZES,
        f.Field("q_lora_rank", "q_lora_rank", 1536, nullable=True),
        f.Field("kv_lora_rank", "kv_lora_rank", 512),
        f.Field("qk_nope_head_dim", "qk_head_dim", 128),
        f.Field("qk_rope_head_dim", "qk_pos_emb_head_dim", 64),
        f.Field("v_head_dim", "v_head_dim", 128),
        f.Field("n_routed_experts", "num_moe_experts"),
        f.Field("num_experts_per_tok", "moe_router_topk", 8),
        f.Field("moe_intermediate_size", "moe_ffn_hidden_size"),
        f.Field("routed_scaling_factor", "moe_router_topk_scaling_factor", 2.5),
    ),
    always={
        **f.LINEAR_ROUTER,
        "multi_latent_attention": True,
        "rope_type": "rope",
        "qk_layernorm": True,
        "add_qkv_bias": False,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        # the bias balances the load
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
    },
    only={
        "attention_bias": (False,),
        "norm_topk_prob": (True,),
        "rope_interleave": (True,),
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
        "moe_layer_freq": (1,),
        "num_nextn_predict_layers": (0, None),
    },
    spellings={
        "num_local_experts": "n_routed_experts",
        "num_mtp_layers": "num_nextn_predict_layers",
    },
    max_position_embeddings=4096,
    read_pattern=lambda hf: [
        layer >= hf.get("first_k_dense_replace", 3) for layer in range(hf["num_hidden_layers"])
    ],
    write_pattern=_write_dense_first,
    check=_check,
    read_rest=_read_rest,
    write_rest=_write_rest,
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
        "router_bias": _MLP + "gate.e_score_correction_bias",
        **f.EXPERTS,
        **{f"shared_{p}": f"{_MLP}shared_experts.{p}_proj.weight" for p in f.MLP},
    },
)
