"""Ernie4_5_MoeForCausalLM: ERNIE 4.5. It has a softmax router with a bias (models/router.py),
rotary positions on neighbouring channels, and experts in a range of the layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gspo_megatron.errors import problem
from gspo_megatron.families import family as f
from gspo_megatron.families import sigmoid_router as r
from gspo_megatron.families.rope import RopeKinds

# The first and the last layer that may have experts, and the distance between two layers with
# experts. The values are transformers' defaults.
_RANGE = {"moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 1}


def _check(hf: Mapping[str, Any]) -> list[str]:
    """Refuse keys with two numbers instead of one. Only vision-language models have such keys."""
    return [
        problem(key, hf[key], "not supported; allowed: an integer")
        for key in ("moe_layer_start_index", "moe_layer_end_index")
        if key in hf and type(hf[key]) is not int
    ]


def _read_pattern(hf: Mapping[str, Any]) -> list[bool]:
    first, last, interval = (hf.get(key, default) for key, default in _RANGE.items())
    count = hf["num_hidden_layers"]
    last = count - 1 if last == -1 else last
    return [first <= layer <= last and (layer + 1) % interval == 0 for layer in range(count)]


def _write_pattern(experts: list[bool]) -> dict[str, Any] | None:
    numbers = [layer for layer, has_experts in enumerate(experts) if has_experts]
    if not numbers:
        return {"moe_layer_start_index": len(experts)}
    interval = numbers[1] - numbers[0] if len(numbers) > 1 else 1
    keys = dict(zip(_RANGE, (numbers[0], numbers[-1], interval)))
    return keys if _read_pattern(keys | {"num_hidden_layers": len(experts)}) == experts else None


FAMILY = f.Family(
    model_type="ernie4_5_moe",
    architecture="Ernie4_5_MoeForCausalLM",
    no_cpu_servers="ignore the bias of a router without groups",
    fields=(
        *f.sizes(1e-5),
        f.key_value_heads(4),
        f.Field("head_dim", "kv_channels", None),
        f.Field("moe_num_experts", "num_moe_experts"),
        f.Field("moe_k", "moe_router_topk", 6),
        f.Field("moe_intermediate_size", "moe_ffn_hidden_size"),
    ),
    always={
        **r.ALWAYS,
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": True,  # softmax over all experts; the chosen weights sum to 1
        "rotary_interleaved": True,
        "qk_layernorm": False,
        "add_qkv_bias": False,
    },
    only={"use_bias": (False,), "moe_norm_min": (1e-12,)},
    spellings={"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
    next_token_layers="num_nextn_predict_layers",
    unread_starts=("model.mtp_",),
    rope=RopeKinds(base=500_000.0),
    max_position_embeddings=131_072,
    tied=True,
    read_pattern=_read_pattern,
    write_pattern=_write_pattern,
    check=_check,
    read_rest=lambda hf: r.read_shared(hf, "moe_num_shared_experts", default=2),
    write_rest=lambda megatron: r.write_shared(megatron, "moe_num_shared_experts"),
    names={
        **f.EMBEDDINGS,
        **f.NORMS,
        **f.ATTENTION,
        **f.DENSE,
        **f.ROUTER,
        "router_bias": f.LAYER + "mlp.moe_statics.e_score_correction_bias",
        **f.EXPERTS,
        **f.shared_experts("shared_experts"),
    },
    router_bias_is_row=True,
)
