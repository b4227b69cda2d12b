"""The map between the tensors of Hugging Face (HF) models and those of Megatron-Core, for all
families.

A recipe describes one Megatron tensor as a set of boxes. A box is a block of one HF tensor and its
place in the Megatron tensor. Boxes do not overlap. Elements that no box covers are padding. Import
and export use the same boxes. For a shard the boxes are cut to the elements of the shard, so no
other elements are read or sent. The names of the HF tensors come from the family
(families/family.py).
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from gspo_megatron.families import Family
from gspo_megatron.families.model_shape import (
    ModelShape,
    delta_net_layers,
    delta_net_sizes,
    experts_in_layers,
)

if TYPE_CHECKING:
    from torch import Tensor

Slices = tuple[slice, ...]

OUTPUT_LAYER = "output_layer.weight"
SCORE_HEAD = "score.weight"  # a preference model's head, in HF folders and in checkpoints

MOST_ELEMENTS = 2**24  # the most elements that are read and converted at once


@dataclass(frozen=True)
class Box:
    """Elements [source, source + size) of the HF tensor `name`, at [target, target + size) of the
    Megatron tensor.

    One of the two tensors may have fewer dimensions than the other. The dimensions of the smaller
    tensor are then the last dimensions of the larger tensor, and the box has size 1 along the
    larger tensor's first dimensions. `axes` has, for each dimension of the HF tensor, the number of
    this dimension in the Megatron tensor (None: the same order). `step` is the distance between the
    box's elements along the last dimension of the HF tensor.
    """

    name: str
    source: tuple[int, ...]
    target: tuple[int, ...]
    size: tuple[int, ...]
    axes: tuple[int, ...] | None = None
    step: int = 1

    @property
    def is_plain(self) -> bool:
        """Whether the box's elements have the same order in both tensors, without gaps."""
        return self.axes is None and self.step == 1

    @property
    def source_size(self) -> tuple[int, ...]:
        return self._in_source(self.size, missing=1)

    @property
    def source_slices(self) -> Slices:
        steps = (*[1] * (len(self.source) - 1), self.step)
        return tuple(
            slice(at, at + (n - 1) * step + 1, step if step > 1 else None)
            for at, n, step in zip(self.source, self.source_size, steps, strict=True)
        )

    def _in_source(self, values: Sequence[int], missing: int) -> tuple[int, ...]:
        """Reorder `values`, one for each dimension of the Megatron tensor, to the order of the HF
        tensor's dimensions. `missing` is the value for dimensions that only the HF tensor has."""
        last = last_values(values, len(self.source), missing)
        return last if self.axes is None else tuple(last[axis] for axis in self.axes)

    def to_source(self, part: Tensor) -> Tensor:
        """Convert the box's elements [size] from the Megatron tensor to their shape in the HF
        tensor."""
        if self.axes is None:
            return part.reshape(self.source_size)
        ordered = [self.source_size[self.axes.index(axis)] for axis in range(len(self.axes))]
        return part.reshape(ordered).permute(self.axes)

    def to_target(self, part: Tensor) -> Tensor:
        """Convert the box's elements from the HF tensor to their shape in the Megatron tensor."""
        if self.axes is not None:
            part = part.permute([self.axes.index(axis) for axis in range(len(self.axes))])
        return part.reshape(self.size)

    @property
    def target_slices(self) -> Slices:
        return tuple(slice(at, at + n) for at, n in zip(self.target, self.size, strict=True))

    @property
    def numel(self) -> int:
        return math.prod(self.size)

    def cut(self, slices: Sequence[slice]) -> Box | None:
        """The part of the box within `slices` of the Megatron tensor; None if there is no such
        part. The target of the part is counted from the start of the slices."""
        starts, sizes, shifts = [], [], []
        for at, n, part in zip(self.target, self.size, slices, strict=True):
            first, last = max(at, part.start), min(at + n, part.stop)
            if first >= last:
                return None
            starts.append(first - part.start)
            sizes.append(last - first)
            shifts.append(first - at)
        *shifts, last = self._in_source(shifts, missing=0)
        shifts = [*shifts, last * self.step]
        source = tuple(at + shift for at, shift in zip(self.source, shifts, strict=True))
        return replace(self, source=source, target=tuple(starts), size=tuple(sizes))


def last_values(values: Sequence[int], count: int, fill: int) -> tuple[int, ...]:
    """The last `count` values. If there are fewer values, `fill` is put in front of them."""
    return (fill,) * (count - len(values)) + tuple(values[max(0, len(values) - count) :])


@dataclass(frozen=True)
class TensorRecipe:
    """A Megatron tensor of `shape` made of HF tensors."""

    shape: tuple[int, ...]
    boxes: tuple[Box, ...]

    def cut(self, slices: Sequence[slice]) -> Iterator[Box]:
        """The boxes of a slice of the tensor. Targets are counted from the start of the slice. The
        slice may reach beyond the tensor, into padding."""
        return filter(None, (box.cut(slices) for box in self.boxes))


def copy(name: str, *shape: int) -> TensorRecipe:
    """One HF tensor, unchanged."""
    zeros = (0,) * len(shape)
    return TensorRecipe(tuple(shape), (Box(name, zeros, zeros, tuple(shape)),))


def rows_of(recipe: TensorRecipe, starts: Iterable[int], count: int) -> TensorRecipe:
    """The joined pieces of a tensor: `count` rows from each of `starts` on."""
    others = [slice(0, size) for size in recipe.shape[1:]]
    parts = (recipe.cut([slice(start, start + count), *others]) for start in starts)
    return concatenate([TensorRecipe((count, *recipe.shape[1:]), tuple(boxes)) for boxes in parts])


def concatenate(recipes: Sequence[TensorRecipe]) -> TensorRecipe:
    """The tensors joined along the first dimension."""
    boxes: list[Box] = []
    total = 0
    for recipe in recipes:
        assert recipe.shape[1:] == recipes[0].shape[1:], "rows of different widths"
        boxes += (
            replace(box, target=(box.target[0] + total, *box.target[1:])) for box in recipe.boxes
        )
        total += recipe.shape[0]
    return TensorRecipe((total, *recipes[0].shape[1:]), tuple(boxes))


def interleave(recipes: Sequence[TensorRecipe], groups: int) -> TensorRecipe:
    """Cut each tensor into `groups` equal groups along the first dimension, and join the groups:
    the first group of every tensor, then the second group of every tensor, and so on."""
    chunks = []
    for group, recipe in itertools.product(range(groups), recipes):
        count, rest = divmod(recipe.shape[0], groups)
        assert not rest, "groups of unequal size"
        chunks.append(rows_of(recipe, [group * count], count))
    return concatenate(chunks)


def stack(recipes: Sequence[TensorRecipe]) -> TensorRecipe:
    """The tensors joined along a new first dimension."""
    boxes: list[Box] = []
    for index, recipe in enumerate(recipes):
        assert recipe.shape == recipes[0].shape, "layers of different shapes"
        boxes += (
            replace(box, target=(index, *box.target), size=(1, *box.size)) for box in recipe.boxes
        )
    return TensorRecipe((len(recipes), *recipes[0].shape), tuple(boxes))


def flatten(recipe: TensorRecipe) -> TensorRecipe:
    """The tensor with its first two dimensions joined into one. Each box must lie within one index
    of the first dimension."""
    outer, inner, *rest = recipe.shape
    boxes = []
    for box in recipe.boxes:
        assert box.size[0] == 1, "a box over several layers of a stack"
        target = (box.target[0] * inner + box.target[1], *box.target[2:])
        boxes.append(replace(box, target=target, size=box.size[1:]))
    return TensorRecipe((outer * inner, *rest), tuple(boxes))


Read = Callable[[str, Slices], "Tensor"]


def fill(out: Tensor, recipe: TensorRecipe, slices: Sequence[slice], read: Read) -> None:
    """Fill `out` with a slice of a Megatron tensor. Padding becomes zero.

    read(name, slices) returns this part of an HF tensor; the part may have any dtype and device.
    `fill` calls it only for elements that the slice needs.
    """
    boxes = list(recipe.cut(slices))
    if sum(box.numel for box in boxes) < out.numel():
        out.zero_()
    for box in boxes:
        for block in split(box):
            part = read(block.name, block.source_slices)
            out[block.target_slices].copy_(block.to_target(part))


def split(box: Box) -> Iterator[Box]:
    """Cut a box into boxes of whole rows, each of at most MOST_ELEMENTS or of one row."""
    axis = max(0, len(box.size) - len(box.source))
    rows = box.size[axis]
    step = max(1, MOST_ELEMENTS * rows // max(1, box.numel))
    for first in range(0, rows, step):
        slices = list(box.target_slices)
        start = box.target[axis] + first
        slices[axis] = slice(start, min(start + step, slices[axis].stop))
        part = box.cut(slices)
        assert part is not None, "rows of the box itself"
        yield replace(part, target=tuple(each.start for each in slices))


# The two backends have different names for tensors: Transformer Engine fuses a norm into the linear
# layer after it, and has the gate and up projections of an expert in one matrix. Checkpoints and
# this map use the names of torch_native, so that a run can continue without Transformer Engine.
_ALIASES = (
    (re.compile(r"\.self_attention\.linear_qkv\.layer_norm_(\w+)"), r".input_layernorm.\1"),
    (
        re.compile(r"\.self_attention\.linear_(q|kv)_up_proj\.layer_norm_(\w+)"),
        r".self_attention.\1_layernorm.\2",
    ),
    (re.compile(r"\.self_attention\.in_proj\.layer_norm_(\w+)"), r".input_layernorm.\1"),
    (re.compile(r"\.mlp\.linear_fc1\.layer_norm_(\w+)"), r".pre_mlp_layernorm.\1"),
    (
        re.compile(r"\.mlp\.experts\.experts\.linear_fc([12])\.(weight|bias)"),
        r".mlp.experts.\2\1",
    ),
    (re.compile(r"\.mlp\.experts\.experts\.lora\."), ".mlp.experts.lora."),
)


def native_name(name: str) -> str:
    """The name that a tensor has in the torch_native backend. `name`: its name in either
    backend."""
    for pattern, ours in _ALIASES:
        name = pattern.sub(ours, name)
    return name


def is_one_matrix(name: str) -> bool:
    """Whether this tensor holds gate and up projection of an expert, or their biases, as the halves
    of one matrix [2 * ffn, hidden]. In the torch_native backend this tensor is [2, ffn, hidden]."""
    native = native_name(name)
    return native != name and re.search(r"\.experts\.(weight|bias)1", native) is not None


def is_vocabulary(name: str) -> bool:
    """Whether the first axis of a tensor is the vocabulary, which is padded."""
    of_adapter = name.startswith("output_layer_lora.") and name.endswith(".b")
    return of_adapter or name.endswith(("word_embeddings.weight", "output_layer.weight"))


def is_never_rounded(name: str) -> bool:
    """Whether a tensor stays fp32 in a bf16 model: biases of routers, which Megatron-Core
    accumulates, and the decay of delta nets, whose small errors grow along a sequence."""
    return name.endswith((".expert_bias", ".A_log", ".dt_bias"))


@dataclass(frozen=True)
class WeightMap:
    """The tensors of one model, in Megatron-Core and in HF files, in the order of its layers.

    `recipes`: the recipes of the Megatron tensors, by their layout-independent names
    (models/shards.py) in the torch_native backend. `shapes`: the shapes of the HF tensors, by name.
    """

    recipes: Mapping[str, TensorRecipe]
    shapes: Mapping[str, tuple[int, ...]]

    def __getitem__(self, name: str) -> TensorRecipe:
        """The recipe of a tensor by any of its names: a shard's name, Transformer Engine's, or the
        key in a checkpoint, in which all experts of a layer are one tensor. Raises KeyError.
        """
        native, one_matrix = native_name(name), is_one_matrix(name)
        recipe = self.recipes.get(native)
        if recipe is not None:
            return flatten(recipe) if one_matrix else recipe
        experts = []
        while (expert := self.recipes.get(f"{native}[{len(experts)}]")) is not None:
            experts.append(flatten(expert) if one_matrix else expert)
        if not experts:
            raise KeyError(name)
        return stack(experts)


def weight_map(
    family: Family, shape: ModelShape, vocab_size: int, *, joint_experts: bool = False
) -> WeightMap:
    """The map of a model of this family. vocab_size: the size of the vocabulary without padding;
    joint_experts: whether the files have all experts of a layer in one tensor."""
    recipes = dict(_recipes(family, shape, vocab_size, joint_experts))
    shapes: dict[str, tuple[int, ...]] = {}
    for box in (box for recipe in recipes.values() for box in recipe.boxes):
        ends = tuple(part.stop for part in box.source_slices)
        shapes[box.name] = tuple(map(max, shapes.get(box.name, ends), ends))
    return WeightMap(recipes, shapes)


def _recipes(
    family: Family, shape: ModelShape, vocab_size: int, joint_experts: bool
) -> Iterator[tuple[str, TensorRecipe]]:
    names, hidden = family.names, shape.hidden_size
    delta_nets = delta_net_layers(shape)
    yield "embedding.word_embeddings.weight", copy(names["embedding"], vocab_size, hidden)
    for number, has_experts in enumerate(experts_in_layers(shape)):
        parts = {part: name.replace("{layer}", str(number)) for part, name in names.items()}
        layer = {
            "input_layernorm.weight": copy(parts["input_norm"], hidden),
            "pre_mlp_layernorm.weight": copy(parts["mlp_norm"], hidden),
        }
        if delta_nets[number]:
            layer |= _delta_net(parts, shape)
        elif shape.has_latent_attention:
            layer |= _latent_attention(parts, shape)
        else:
            layer |= _attention(parts, shape)
        if has_experts:
            layer |= _mixture(parts, shape, joint_experts, row_bias=family.router_bias_is_row)
        else:
            layer |= _gated_mlp("mlp.", parts, "", hidden, shape.ffn_hidden_size)
        for name, recipe in layer.items():
            yield f"decoder.layers.{number}.{name}", recipe
    yield "decoder.final_layernorm.weight", copy(names["final_norm"], hidden)
    if shape.scores:
        yield SCORE_HEAD, copy(SCORE_HEAD, 1, hidden)
    elif not shape.tie_embeddings:
        yield OUTPUT_LAYER, copy(names["head"], vocab_size, hidden)


def _attention(parts: Mapping[str, str], shape: ModelShape) -> dict[str, TensorRecipe]:
    """The recipes of attention. linear_qkv holds, for each query group, its queries, their output
    gates (if there are any), its key and its value. In HF files the gate of a head follows the
    head's query."""
    hidden, width, groups = shape.hidden_size, shape.kv_channels, shape.num_query_groups
    heights = {"q": shape.num_attention_heads * width, "k": groups * width, "v": groups * width}

    def qkv(suffix: str, *sizes: int) -> TensorRecipe:
        if f"qkv{suffix}" in parts:  # the files have q, k and v in one tensor
            whole = copy(parts[f"qkv{suffix}"], sum(heights.values()), *sizes)
            starts = itertools.accumulate(heights.values(), initial=0)
            pieces = [rows_of(whole, [at], height) for at, height in zip(starts, heights.values())]
        else:
            pieces = [copy(parts[part + suffix], heights[part], *sizes) for part in "qkv"]
        if shape.megatron.get("attention_output_gate"):
            both = copy(parts[f"q{suffix}"], 2 * heights["q"], *sizes)
            heads = range(0, 2 * heights["q"], 2 * width)
            gates = rows_of(both, (start + width for start in heads), width)
            pieces = [rows_of(both, heads, width), gates, *pieces[1:]]
        return interleave(pieces, groups)

    recipes = {
        "self_attention.linear_qkv.weight": qkv("", hidden),
        "self_attention.linear_proj.weight": copy(parts["o"], hidden, heights["q"]),
    }
    if shape.megatron.get("add_qkv_bias"):
        recipes["self_attention.linear_qkv.bias"] = qkv("_bias")
    if shape.megatron.get("add_bias_linear"):
        recipes["self_attention.linear_proj.bias"] = copy(parts["o_bias"], hidden)
    if shape.megatron.get("softmax_type") == "learnable":
        sinks = copy(parts["sinks"], shape.num_attention_heads)
        recipes["self_attention.core_attention.softmax_offset"] = sinks
    if shape.megatron.get("qk_layernorm"):
        for part in "qk":
            norm = copy(parts[f"{part}_norm"], heights[part] if shape.joint_qk_norm else width)
            recipes[f"self_attention.{part}_layernorm.weight"] = norm
    return recipes


def _latent_attention(parts: Mapping[str, str], shape: ModelShape) -> dict[str, TensorRecipe]:
    """The recipes of latent attention. They are plain copies, because HF models and Megatron-Core
    order the parts and channels of a head in the same way."""
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


_IN_PROJECTIONS = {
    "in_qkvz": ("query", "key", "value", "z"),
    "in_ba": ("beta", "alpha"),
    "in_qkv": ("query", "key", "value"),
    "in_z": ("z",),
    "in_b": ("beta",),
    "in_a": ("alpha",),
}


def _delta_net(parts: Mapping[str, str], shape: ModelShape) -> dict[str, TensorRecipe]:
    """The recipes of a gated delta net. In checkpoints, in_proj and conv1d are several tensors
    (query, key, ...), each with all heads in order. HF files have this order, too. Only the files
    of qwen3_next have another order: all rows that belong to one key head follow each other."""
    sizes, hidden = delta_net_sizes(shape.megatron), shape.hidden_size
    keys, values = sizes["linear_num_key_heads"], sizes["linear_num_value_heads"]
    key, value = sizes["linear_key_head_dim"], sizes["linear_value_head_dim"]
    rows = {"query": keys * key, "key": keys * key, "value": values * value}
    start = "self_attention."
    in_proj = rows | {"z": values * value, "beta": values, "alpha": values}
    groups = keys if "in_qkvz" in parts else 1
    recipes = {}
    for source, names in _IN_PROJECTIONS.items():
        if source not in parts:
            continue
        widths = {name: in_proj[name] // groups for name in names}
        whole = copy(parts[source], sum(in_proj[name] for name in names), hidden)
        at, step = 0, sum(widths.values())
        for name, width in widths.items():
            places = range(at, groups * step, step)
            recipes[f"{start}in_proj.weight.{name}"] = rows_of(whole, places, width)
            at += width
    kernel = (1, sizes["linear_conv_kernel_dim"])
    conv, at = copy(parts["conv"], sum(rows.values()), *kernel), 0
    for name, width in rows.items():
        recipes[f"{start}conv1d.weight.{name}"] = rows_of(conv, [at], width)
        at += width
    return recipes | {
        f"{start}A_log": copy(parts["decay"], values),
        f"{start}dt_bias": copy(parts["decay_bias"], values),
        f"{start}out_norm.weight": copy(parts["delta_norm"], value),
        f"{start}out_proj.weight": copy(parts["delta_out"], hidden, values * value),
    }


def _gated_mlp(
    prefix: str, parts: Mapping[str, str], kind: str, hidden: int, width: int
) -> dict[str, TensorRecipe]:
    """The recipes of a gated MLP. The first rows of linear_fc1 are the gate matrix, the last rows
    the up matrix."""
    gate, up = (copy(parts[f"{kind}{part}"], width, hidden) for part in ("gate", "up"))
    return {
        f"{prefix}linear_fc1.weight": concatenate([gate, up]),
        f"{prefix}linear_fc2.weight": copy(parts[f"{kind}down"], hidden, width),
    }


def _mixture(
    parts: Mapping[str, str], shape: ModelShape, joint_experts: bool, *, row_bias: bool
) -> dict[str, TensorRecipe]:
    """The recipes of a layer with experts. row_bias: see Family.router_bias_is_row."""
    hidden, width, experts = shape.hidden_size, shape.moe_ffn_hidden_size, shape.num_moe_experts
    assert width is not None and experts is not None, "no sizes of experts"
    recipes = {"mlp.router.weight": copy(parts["router"], experts, hidden)}
    if shape.megatron.get("moe_router_enable_expert_bias"):
        box = Box(parts["router_bias"], (0, 0) if row_bias else (0,), (0,), (experts,))
        recipes["mlp.router.expert_bias"] = TensorRecipe((experts,), (box,))
    if shape.megatron.get("add_bias_linear"):
        recipes["mlp.router.bias"] = copy(parts["router_linear_bias"], experts)
    if "interleaved_gate_up" in parts:
        return recipes | _interleaved_experts(parts, hidden, width, experts)
    for expert in range(experts):
        both, down = (_joint_expert if joint_experts else _expert)(parts, expert, hidden, width)
        recipes[f"mlp.experts.weight1[{expert}]"] = both
        recipes[f"mlp.experts.weight2[{expert}]"] = down
    shared = shape.moe_shared_expert_intermediate_size
    if shared is not None:
        recipes |= _gated_mlp("mlp.shared_experts.", parts, "shared_", hidden, shared)
        if shape.megatron.get("moe_shared_expert_gate"):
            recipes["mlp.shared_experts.gate_weight"] = copy(parts["shared_router"], 1, hidden)
    return recipes


def _expert(
    parts: Mapping[str, str], expert: int, hidden: int, width: int
) -> tuple[TensorRecipe, TensorRecipe]:
    """The recipes of one expert: gate and up projection [2, width, hidden], and down projection."""
    gate, up, down = (
        parts[f"expert_{part}"].replace("{expert}", str(expert)) for part in ("gate", "up", "down")
    )
    return stack([copy(gate, width, hidden), copy(up, width, hidden)]), copy(down, hidden, width)


def _joint_expert(
    parts: Mapping[str, str], expert: int, hidden: int, width: int
) -> tuple[TensorRecipe, TensorRecipe]:
    """The recipes of one expert from the tensors of all experts, [experts, 2 * width, hidden] and
    [experts, hidden, width]."""
    size = (1, width, hidden)
    both = [
        Box(parts["experts_gate_up"], (expert, half * width, 0), (half, 0, 0), size)
        for half in range(2)
    ]
    down = Box(parts["experts_down"], (expert, 0, 0), (0, 0), (hidden, width))
    return TensorRecipe((2, width, hidden), tuple(both)), TensorRecipe((hidden, width), (down,))


def _interleaved_experts(
    parts: Mapping[str, str], hidden: int, width: int, experts: int
) -> dict[str, TensorRecipe]:
    """The recipes of gpt-oss's experts. Its files have these tensors for all experts of a layer:
    gate_up_proj [experts, hidden, 2 * width], in which the columns of gate and up alternate;
    down_proj [experts, width, hidden]; and the biases of these two tensors."""
    recipes = {}
    for expert in range(experts):
        weight = partial(Box, parts["interleaved_gate_up"], size=(1, width, hidden), step=2)
        bias = partial(Box, parts["interleaved_gate_up_bias"], size=(1, width), step=2)
        halves = range(2)
        boxes = [weight((expert, 0, n), (n, 0, 0), axes=(0, 2, 1)) for n in halves]
        recipes[f"mlp.experts.weight1[{expert}]"] = TensorRecipe((2, width, hidden), tuple(boxes))
        boxes = [bias((expert, n), (n, 0)) for n in halves]
        recipes[f"mlp.experts.bias1[{expert}]"] = TensorRecipe((2, width), tuple(boxes))
        down = Box(parts["transposed_down"], (expert, 0, 0), (0, 0), (hidden, width), (0, 2, 1))
        recipes[f"mlp.experts.weight2[{expert}]"] = TensorRecipe((hidden, width), (down,))
        down = Box(parts["down_bias"], (expert, 0), (0,), (hidden,))
        recipes[f"mlp.experts.bias2[{expert}]"] = TensorRecipe((hidden,), (down,))
    return recipes
