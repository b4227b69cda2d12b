"""The router of DeepSeek-V3 and of later models. Scores are sigmoids. A bias balances the load, and
is used only for choosing experts. There are shared experts, and the first layers are dense."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gspo_megatron.errors import format_value, problem
from gspo_megatron.families import family as f

ALWAYS: dict[str, Any] = {
    **f.LINEAR_ROUTER,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    # the bias balances the load
    "moe_router_load_balancing_type": "none",
    "moe_aux_loss_coeff": 0.0,
}


def fields(topk: int, scaling: float) -> tuple[f.Field, ...]:
    """The fields of routed experts. The arguments are the defaults of num_experts_per_tok and
    routed_scaling_factor."""
    return (
        f.Field("n_routed_experts", "num_moe_experts"),
        f.Field("num_experts_per_tok", "moe_router_topk", topk),
        f.Field("moe_intermediate_size", "moe_ffn_hidden_size"),
        f.Field("routed_scaling_factor", "moe_router_topk_scaling_factor", scaling),
    )


@dataclass(frozen=True)
class Groups:
    """The groups of experts in a family: a token's experts are chosen from the best groups only."""

    count: int = 1  # default of n_group, the number of groups
    chosen: int = 1  # default of topk_group, the number of best groups
    topk: int = 8  # default of num_experts_per_tok
    experts: str = "n_routed_experts"  # the key for the number of experts

    def problems(self, hf: Mapping[str, Any]) -> list[str]:
        """Return a line for each wrong number. If all numbers are right, return a line if
        Megatron-Core would choose other experts than the published model."""
        count, experts = hf.get("n_group", self.count), hf.get(self.experts)
        chosen, topk = hf.get("topk_group", self.chosen), hf.get("num_experts_per_tok", self.topk)
        if count in (None, 1) or not experts:
            return []
        problems = []
        is_count = type(count) is int and count > 0
        if not is_count or (type(experts) is int and (experts % count or experts < 2 * count)):
            wrong = f"must divide {self.experts} = {experts} into groups of at least 2, or be 1"
            problems.append(problem("n_group", count, wrong))
        if type(chosen) is not int or chosen < 1 or (is_count and chosen > count):
            problems.append(problem("topk_group", chosen, "must be an integer from 1 to n_group"))
        if problems:
            return problems
        # The score of a group is the sum of the scores of its best two experts. Megatron-Core adds
        # up the best topk // topk_group instead.
        if topk == 2 * chosen:
            return []
        wrong = f"not supported with topk_group = {chosen}; allowed: {2 * chosen}, or n_group = 1"
        return [problem("num_experts_per_tok", topk, wrong)]

    def read(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of TransformerConfig for the groups."""
        count = hf.get("n_group", self.count)
        if count in (None, 1):
            return {}
        chosen = hf.get("topk_group", self.chosen)
        return {"moe_router_num_groups": count, "moe_router_group_topk": chosen}


def write_groups(megatron: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of config.json for `Groups`."""
    return {
        "n_group": megatron.get("moe_router_num_groups") or 1,
        "topk_group": megatron.get("moe_router_group_topk") or 1,
    }


def read_shared(hf: Mapping[str, Any], key: str, default: int = 1) -> dict[str, Any]:
    """The fields of the shared experts, which are computed as one expert. key: the key of
    config.json that has their number; default: the number if this key is missing."""
    width = (hf.get(key, default) or 0) * (hf.get("moe_intermediate_size") or 0)
    return {"moe_shared_expert_intermediate_size": width or None}


def write_shared(megatron: Mapping[str, Any], key: str) -> dict[str, Any]:
    shared = megatron.get("moe_shared_expert_intermediate_size") or 0
    return {key: shared // (megatron.get("moe_ffn_hidden_size") or 1)}


def dense_first(default: int, *, has_types: bool = False) -> f.ReadPattern:
    """Return a function that reads which layers have experts: all except the first
    `first_k_dense_replace` layers. default: the number of these layers if the key is missing.
    has_types: if config.json has `mlp_layer_types`, this list decides instead. Without `has_types`
    the list is ignored."""

    def read(hf: Mapping[str, Any]) -> list[bool]:
        kinds = hf.get("mlp_layer_types") if has_types else None
        if kinds is not None:
            return [kind == "sparse" for kind in kinds]
        dense = hf.get("first_k_dense_replace", default)
        return [layer >= dense for layer in range(hf["num_hidden_layers"])]

    return read


def layer_problems(hf: Mapping[str, Any]) -> list[str]:
    """Return the problems of `mlp_layer_types`."""
    kinds, count = hf.get("mlp_layer_types"), hf.get("num_hidden_layers")
    if kinds is None:
        return []
    fits = isinstance(kinds, list) and set(kinds) <= {"dense", "sparse"} and len(kinds) == count
    if not fits:
        wrong = f"must be `dense` or `sparse` for each of the {count} layers"
        return [problem("mlp_layer_types", kinds, wrong)]
    dense = hf.get("first_k_dense_replace")
    if dense is not None and kinds != ["dense" if n < dense else "sparse" for n in range(count)]:
        wrong = f"contradicts mlp_layer_types = {format_value(kinds)}; keep the right one"
        return [problem("first_k_dense_replace", dense, wrong)]
    return []


def write_dense_first(experts: list[bool]) -> dict[str, Any] | None:
    dense = experts.index(True) if True in experts else len(experts)
    return {"first_k_dense_replace": dense} if all(experts[dense:]) else None


def write_layer_types(experts: list[bool]) -> dict[str, Any]:
    """The kind of each layer, and the number of dense layers at the start, which vLLM reads."""
    dense = write_dense_first(experts) or {}
    return dense | {"mlp_layer_types": ["sparse" if each else "dense" for each in experts]}
