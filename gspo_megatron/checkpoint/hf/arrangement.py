"""Which Megatron-Core tensors a model has and what each is made of: the map for all families.

Megatron-Core's side of it is written here once; a family says how the parts are called in its files
(config/families).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gspo_megatron.checkpoint.hf.pieces import (
    Box,
    Recipe,
    concatenate,
    copy,
    flatten,
    interleave,
    stack,
)
from gspo_megatron.checkpoint.names import is_one_matrix, native_name
from gspo_megatron.config.families import Family
from gspo_megatron.config.model_shape import ModelShape, experts_in_layers


@dataclass(frozen=True)
class WeightMap:
    """The tensors of one model on both sides.

    `recipes` are the Megatron tensors by the layout-independent names of models/shards.py, as the
    torch_native backend has them, in the order of the model's layers; `shapes` the HF tensors, in
    the same order; `made_of` says for each HF tensor which Megatron tensors hold it, and where: a
    box cut at the whole Megatron tensor.
    """

    recipes: Mapping[str, Recipe]
    shapes: Mapping[str, tuple[int, ...]]
    made_of: Mapping[str, tuple[tuple[str, Box], ...]]

    def __getitem__(self, name: str) -> Recipe:
        """The recipe of a tensor by any of its names: that of a shard, Transformer Engine's, or the
        key of a checkpoint, where all experts of a layer are one tensor.

        Raises KeyError.
        """
        known, one_matrix = native_name(name), is_one_matrix(name)
        found = self.recipes.get(known)
        if found is not None:
            return flatten(found) if one_matrix else found
        experts = []
        while (expert := self.recipes.get(f"{known}[{len(experts)}]")) is not None:
            experts.append(flatten(expert) if one_matrix else expert)
        if not experts:
            raise KeyError(name)
        return stack(experts)


def weight_map(family: Family, shape: ModelShape, vocab_size: int) -> WeightMap:
    """The map of a model of this family. `vocab_size` is the true one: what the embedding has
    beyond it is padding."""
    recipes = dict(_recipes(family, shape, vocab_size))
    shapes: dict[str, tuple[int, ...]] = {}
    made_of: dict[str, list[tuple[str, Box]]] = {}
    for name, recipe in recipes.items():
        for box in recipe.boxes:
            ends = tuple(part.stop for part in box.source_slices)
            known = shapes.get(box.name, ends)
            shapes[box.name] = tuple(map(max, known, ends))
            made_of.setdefault(box.name, []).append((name, box))
    return WeightMap(recipes, shapes, {name: tuple(boxes) for name, boxes in made_of.items()})


def _recipes(family: Family, shape: ModelShape, vocab_size: int) -> Iterator[tuple[str, Recipe]]:
    names, hidden = family.names, shape.hidden_size
    yield "embedding.word_embeddings.weight", copy(names["embedding"], vocab_size, hidden)
    for number, has_experts in enumerate(experts_in_layers(shape)):
        parts = {part: name.replace("{layer}", str(number)) for part, name in names.items()}
        layer = dict(_norms(parts, hidden))
        latent = shape.megatron.get("multi_latent_attention")
        layer |= _latent_attention(parts, shape) if latent else _attention(parts, shape)
        layer |= _mixture(parts, shape) if has_experts else _dense_mlp(parts, shape)
        for name, recipe in layer.items():
            yield f"decoder.layers.{number}.{name}", recipe
    yield "decoder.final_layernorm.weight", copy(names["final_norm"], hidden)
    if not shape.tie_embeddings:
        yield "output_layer.weight", copy(names["head"], vocab_size, hidden)


def _norms(parts: Mapping[str, str], hidden: int) -> Iterator[tuple[str, Recipe]]:
    yield "input_layernorm.weight", copy(parts["input_norm"], hidden)
    yield "pre_mlp_layernorm.weight", copy(parts["mlp_norm"], hidden)


def _attention(parts: Mapping[str, str], shape: ModelShape) -> dict[str, Recipe]:
    """Queries, key and value come query group by query group."""
    hidden, width, groups = shape.hidden_size, shape.kv_channels, shape.num_query_groups
    rows = {"q": shape.num_attention_heads * width, "k": groups * width, "v": groups * width}
    qkv = [copy(parts[part], rows[part], hidden) for part in "qkv"]
    recipes = {
        "self_attention.linear_qkv.weight": interleave(qkv, groups),
        "self_attention.linear_proj.weight": copy(parts["o"], hidden, rows["q"]),
    }
    if shape.megatron.get("add_qkv_bias"):
        biases = [copy(parts[f"{part}_bias"], rows[part]) for part in "qkv"]
        recipes["self_attention.linear_qkv.bias"] = interleave(biases, groups)
    if shape.megatron.get("qk_layernorm"):
        for part in "qk":
            norm = copy(parts[f"{part}_norm"], rows[part] if shape.joint_qk_norm else width)
            recipes[f"self_attention.{part}_layernorm.weight"] = norm
    return recipes


def _latent_attention(parts: Mapping[str, str], shape: ModelShape) -> dict[str, Recipe]:
    """Both sides keep the parts of a head together, and rotate neighbouring channels."""
    megatron, hidden, heads = shape.megatron, shape.hidden_size, shape.num_attention_heads
    positional, latent = megatron["qk_pos_emb_head_dim"], megatron["kv_lora_rank"]
    plain, values = megatron["qk_head_dim"], megatron["v_head_dim"]
    query, queries = megatron.get("q_lora_rank"), heads * (plain + positional)
    sizes = {
        "linear_kv_down_proj.weight": ("kv_down", latent + positional, hidden),
        "kv_layernorm.weight": ("kv_norm", latent),
        "linear_kv_up_proj.weight": ("kv_up", heads * (plain + values), latent),
        "linear_proj.weight": ("o", hidden, heads * values),
    }
    if query is None:
        sizes["linear_q_proj.weight"] = ("q", queries, hidden)
    else:
        sizes["linear_q_down_proj.weight"] = ("q_down", query, hidden)
        sizes["q_layernorm.weight"] = ("q_norm", query)
        sizes["linear_q_up_proj.weight"] = ("q_up", queries, query)
    return {
        f"self_attention.{name}": copy(parts[part], *size) for name, (part, *size) in sizes.items()
    }


def _dense_mlp(parts: Mapping[str, str], shape: ModelShape) -> dict[str, Recipe]:
    return _gated_mlp("mlp.", parts, "", shape.hidden_size, shape.ffn_hidden_size)


def _gated_mlp(
    prefix: str, parts: Mapping[str, str], kind: str, hidden: int, width: int
) -> dict[str, Recipe]:
    """The first matrix is that of the gate over that of the values."""
    gate, up = (copy(parts[f"{kind}{part}"], width, hidden) for part in ("gate", "up"))
    return {
        f"{prefix}linear_fc1.weight": concatenate([gate, up]),
        f"{prefix}linear_fc2.weight": copy(parts[f"{kind}down"], hidden, width),
    }


def _mixture(parts: Mapping[str, str], shape: ModelShape) -> dict[str, Recipe]:
    hidden, width, experts = shape.hidden_size, shape.moe_ffn_hidden_size, shape.num_moe_experts
    assert width is not None and experts is not None, "no sizes of experts"
    recipes = {"mlp.router.weight": copy(parts["router"], experts, hidden)}
    if shape.megatron.get("moe_router_enable_expert_bias"):
        recipes["mlp.router.expert_bias"] = copy(parts["router_bias"], experts)
    for expert in range(experts):
        gate, up, down = (
            parts[f"expert_{part}"].replace("{expert}", str(expert))
            for part in ("gate", "up", "down")
        )
        both = [copy(gate, width, hidden), copy(up, width, hidden)]
        recipes[f"mlp.experts.weight1[{expert}]"] = stack(both)
        recipes[f"mlp.experts.weight2[{expert}]"] = copy(down, hidden, width)
    shared = shape.moe_shared_expert_intermediate_size
    if shared is not None:
        recipes |= _gated_mlp("mlp.shared_experts.", parts, "shared_", hidden, shared)
        if shape.megatron.get("moe_shared_expert_gate"):
            recipes["mlp.shared_experts.gate_weight"] = copy(parts["shared_router"], 1, hidden)
    return recipes
