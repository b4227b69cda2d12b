"""How the tensors of a Hugging Face model make up those of Megatron-Core: the map for all families.

A recipe describes one Megatron tensor as a set of boxes. A box is a block of one HF tensor and its
place in the Megatron tensor. Boxes do not overlap; where there is none, the Megatron tensor is
padding. Both directions use the same boxes: they are cut to what a shard needs, so only that is
read or sent. A family (families) gives the names in its files.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gspo_megatron.families import Family
from gspo_megatron.families.model_shape import ModelShape, experts_in_layers

if TYPE_CHECKING:
    from torch import Tensor

Slices = tuple[slice, ...]

MOST_ELEMENTS = 2**24  # read at once, and converted on the way to a device


@dataclass(frozen=True)
class Box:
    """Elements [source, source + size) of the HF tensor `name`, at [target, target + size) of the
    Megatron tensor.

    An HF tensor may have fewer dimensions than the Megatron tensor: its dimensions are then the
    last ones there, and the size along the others is 1.
    """

    name: str
    source: tuple[int, ...]
    target: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def source_size(self) -> tuple[int, ...]:
        return self.size[len(self.size) - len(self.source) :]

    @property
    def source_slices(self) -> Slices:
        return tuple(slice(at, at + n) for at, n in zip(self.source, self.source_size, strict=True))

    @property
    def target_slices(self) -> Slices:
        return tuple(slice(at, at + n) for at, n in zip(self.target, self.size, strict=True))

    @property
    def numel(self) -> int:
        return math.prod(self.size)

    def cut(self, slices: Sequence[slice]) -> Box | None:
        """The part within `slices` of the Megatron tensor; its target counts from their start."""
        starts, sizes, shifts = [], [], []
        for at, n, part in zip(self.target, self.size, slices, strict=True):
            first, last = max(at, part.start), min(at + n, part.stop)
            if first >= last:
                return None
            starts.append(first - part.start)
            sizes.append(last - first)
            shifts.append(first - at)
        shifts = shifts[len(shifts) - len(self.source) :]
        source = tuple(at + shift for at, shift in zip(self.source, shifts, strict=True))
        return Box(self.name, source, tuple(starts), tuple(sizes))


@dataclass(frozen=True)
class TensorRecipe:
    """A Megatron tensor of `shape` made of HF tensors."""

    shape: tuple[int, ...]
    boxes: tuple[Box, ...]

    def cut(self, slices: Sequence[slice]) -> Iterator[Box]:
        """The boxes of a slice of the tensor; their targets are counted from its start. The slice
        may reach beyond the tensor, into padding."""
        return filter(None, (box.cut(slices) for box in self.boxes))


def copy(name: str, *shape: int) -> TensorRecipe:
    """One HF tensor, unchanged."""
    zeros = (0,) * len(shape)
    return TensorRecipe(tuple(shape), (Box(name, zeros, zeros, tuple(shape)),))


def concatenate(recipes: Sequence[TensorRecipe]) -> TensorRecipe:
    """Joined along the first dimension."""
    boxes: list[Box] = []
    rows = 0
    for recipe in recipes:
        assert recipe.shape[1:] == recipes[0].shape[1:], "rows of different widths"
        boxes += (
            replace(box, target=(box.target[0] + rows, *box.target[1:])) for box in recipe.boxes
        )
        rows += recipe.shape[0]
    return TensorRecipe((rows, *recipes[0].shape[1:]), tuple(boxes))


def interleave(recipes: Sequence[TensorRecipe], groups: int) -> TensorRecipe:
    """Each is cut into `groups` along the first dimension; the result has the first group of all,
    then the second group of all, and so on."""
    chunks = []
    for group, recipe in itertools.product(range(groups), recipes):
        rows, rest = divmod(recipe.shape[0], groups)
        assert not rest, "groups of unequal size"
        slices = [slice(group * rows, (group + 1) * rows), *(slice(0, n) for n in recipe.shape[1:])]
        chunks.append(TensorRecipe((rows, *recipe.shape[1:]), tuple(recipe.cut(slices))))
    return concatenate(chunks)


def stack(recipes: Sequence[TensorRecipe]) -> TensorRecipe:
    """Joined along a new first dimension."""
    boxes: list[Box] = []
    for index, recipe in enumerate(recipes):
        assert recipe.shape == recipes[0].shape, "layers of different shapes"
        boxes += (
            replace(box, target=(index, *box.target), size=(1, *box.size)) for box in recipe.boxes
        )
    return TensorRecipe((len(recipes), *recipes[0].shape), tuple(boxes))


def flatten(recipe: TensorRecipe) -> TensorRecipe:
    """The first two dimensions joined into one; each box lies within one index of the first."""
    outer, inner, *rest = recipe.shape
    boxes = []
    for box in recipe.boxes:
        assert box.size[0] == 1, "a box over several layers of a stack"
        target = (box.target[0] * inner + box.target[1], *box.target[2:])
        boxes.append(replace(box, target=target, size=box.size[1:]))
    return TensorRecipe((outer * inner, *rest), tuple(boxes))


Read = Callable[[str, Slices], "Tensor"]


def fill(out: Tensor, recipe: TensorRecipe, slices: Sequence[slice], read: Read) -> None:
    """Fill `out` with a slice of a Megatron tensor; padding becomes zero.

    read(name, slices) returns that part of an HF tensor, of any dtype and device. It is called for
    the elements that the slice needs and for no others.
    """
    boxes = list(recipe.cut(slices))
    if sum(box.numel for box in boxes) < out.numel():
        out.zero_()
    for box in boxes:
        for block in split(box):
            part = read(block.name, block.source_slices)
            out[block.target_slices].copy_(part.view(block.size))


def split(box: Box) -> Iterator[Box]:
    """A box cut into boxes of whole rows, each of at most MOST_ELEMENTS or of one row."""
    axis = len(box.size) - len(box.source)
    rows = box.size[axis]
    step = max(1, MOST_ELEMENTS * rows // max(1, box.numel))
    for first in range(0, rows, step):
        size = (*box.size[:axis], min(step, rows - first), *box.size[axis + 1 :])
        target = (*box.target[:axis], box.target[axis] + first, *box.target[axis + 1 :])
        yield Box(box.name, (box.source[0] + first, *box.source[1:]), target, size)


# Transformer Engine fuses norms into the linear layers that follow them, and keeps gate and up
# projection of an expert in one matrix. Checkpoints and this map use the names of the torch_native
# backend, so that a run can continue without Transformer Engine.
_ALIASES = (
    (re.compile(r"\.self_attention\.linear_qkv\.layer_norm_(\w+)"), r".input_layernorm.\1"),
    (
        re.compile(r"\.self_attention\.linear_(q|kv)_up_proj\.layer_norm_(\w+)"),
        r".self_attention.\1_layernorm.\2",
    ),
    (re.compile(r"\.mlp\.linear_fc1\.layer_norm_(\w+)"), r".pre_mlp_layernorm.\1"),
    (re.compile(r"\.mlp\.experts\.experts\.linear_fc([12])\.weight"), r".mlp.experts.weight\1"),
    (re.compile(r"\.mlp\.experts\.experts\.lora\."), ".mlp.experts.lora."),
)


def native_name(name: str) -> str:
    """The torch_native backend's name of a tensor of either backend."""
    for pattern, ours in _ALIASES:
        name = pattern.sub(ours, name)
    return name


def is_one_matrix(name: str) -> bool:
    """Whether the tensor of this name holds gate and up projection of an expert as the halves of
    one matrix [2 * ffn, hidden]; under its native name it is [2, ffn, hidden]."""
    known = native_name(name)
    return known != name and ".experts.weight1" in known


def is_vocabulary(name: str) -> bool:
    """Whether the first axis of a tensor is the vocabulary, which is padded."""
    return name.endswith(("word_embeddings.weight", "output_layer.weight"))


@dataclass(frozen=True)
class WeightMap:
    """The tensors of one model on both sides, in the order of its layers.

    `recipes`: the Megatron tensors, by the layout-independent names of models/shards.py and of the
    torch_native backend; `shapes`: those of the HF tensors by name.
    """

    recipes: Mapping[str, TensorRecipe]
    shapes: Mapping[str, tuple[int, ...]]

    def __getitem__(self, name: str) -> TensorRecipe:
        """The recipe of a tensor by any of its names: that of a shard, Transformer Engine's, or the
        key in a checkpoint, where all experts of a layer are one tensor. Raises KeyError.
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
    """The map of a model of this family. `vocab_size` is without padding."""
    recipes = dict(_recipes(family, shape, vocab_size))
    shapes: dict[str, tuple[int, ...]] = {}
    for box in (box for recipe in recipes.values() for box in recipe.boxes):
        ends = tuple(part.stop for part in box.source_slices)
        shapes[box.name] = tuple(map(max, shapes.get(box.name, ends), ends))
    return WeightMap(recipes, shapes)


def _recipes(
    family: Family, shape: ModelShape, vocab_size: int
) -> Iterator[tuple[str, TensorRecipe]]:
    names, hidden = family.names, shape.hidden_size
    yield "embedding.word_embeddings.weight", copy(names["embedding"], vocab_size, hidden)
    for number, has_experts in enumerate(experts_in_layers(shape)):
        parts = {part: name.replace("{layer}", str(number)) for part, name in names.items()}
        layer = {
            "input_layernorm.weight": copy(parts["input_norm"], hidden),
            "pre_mlp_layernorm.weight": copy(parts["mlp_norm"], hidden),
        }
        latent = shape.megatron.get("multi_latent_attention")
        layer |= _latent_attention(parts, shape) if latent else _attention(parts, shape)
        if has_experts:
            layer |= _mixture(parts, shape)
        else:
            layer |= _gated_mlp("mlp.", parts, "", hidden, shape.ffn_hidden_size)
        for name, recipe in layer.items():
            yield f"decoder.layers.{number}.{name}", recipe
    yield "decoder.final_layernorm.weight", copy(names["final_norm"], hidden)
    if not shape.tie_embeddings:
        yield "output_layer.weight", copy(names["head"], vocab_size, hidden)


def _attention(parts: Mapping[str, str], shape: ModelShape) -> dict[str, TensorRecipe]:
    """linear_qkv holds, for each query group, its queries, its key and its value."""
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


def _latent_attention(parts: Mapping[str, str], shape: ModelShape) -> dict[str, TensorRecipe]:
    """Plain copies: both sides keep the parts of a head together and rotate channels in pairs."""
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


def _gated_mlp(
    prefix: str, parts: Mapping[str, str], kind: str, hidden: int, width: int
) -> dict[str, TensorRecipe]:
    """linear_fc1 is the gate matrix above the up matrix."""
    gate, up = (copy(parts[f"{kind}{part}"], width, hidden) for part in ("gate", "up"))
    return {
        f"{prefix}linear_fc1.weight": concatenate([gate, up]),
        f"{prefix}linear_fc2.weight": copy(parts[f"{kind}down"], hidden, width),
    }


def _mixture(parts: Mapping[str, str], shape: ModelShape) -> dict[str, TensorRecipe]:
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
