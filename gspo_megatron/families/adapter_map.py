"""The adapters of a model: which matrices have one, and the names of adapters in this project and
in PEFT files.

An adapter is a pair of matrices beside a frozen one: A [rank, in] and B [out, rank]. Every matrix
of the Hugging Face model has a pair of its own, even if Megatron-Core joins several matrices to one
weight (q, k and v; gate and up). So the matrices in a PEFT file are the ones that are trained.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gspo_megatron.errors import ConfigError, did_you_mean, nearest, problem
from gspo_megatron.families.family import Family
from gspo_megatron.families.model_shape import ModelShape
from gspo_megatron.families.weight_map import Box, TensorRecipe, WeightMap, copy, weight_map

if TYPE_CHECKING:
    from torch import Tensor

PEFT_PREFIX = "base_model.model."
PEFT_CONFIG, PEFT_TENSORS = "adapter_config.json", "adapter_model.safetensors"
# Targets that stand for several modules. The target `all` does not include the router and the gate
# of the shared experts, because small changes of a router change which experts compute a token.
# `all` does not include the output layer either, because an adapter of the output layer needs a
# copy of the layer's weight.
GROUPS = ("attention", "mlp", "experts")
ALL, HEAD = "all", "head"
_HEAD_WEIGHT = "output_layer.weight"
_EMBEDDING = ("embedding", "word_embeddings", "embed_tokens", "wte")

_EXPERT = re.compile(r"^(.*\.mlp\.experts)\.weight([12])\[(\d+)\]$")
_LINEAR = re.compile(r"^((?:.*\.)?)(\w+)\.weight$")


def is_adapter(name: str) -> bool:
    """Whether a tensor belongs to an adapter, by its layout-independent name."""
    return "lora." in name


@dataclass(frozen=True)
class Matrix:
    """A matrix of the Hugging Face model that can have an adapter."""

    name: str  # name of the tensor, such as model.layers.0.self_attn.q_proj.weight
    rows: int
    columns: int

    @property
    def module(self) -> str:
        """The name of the matrix's module, such as model.layers.0.self_attn.q_proj."""
        return self.name.removesuffix(".weight")

    @property
    def leaf(self) -> str:
        """The last part of the module's name, such as q_proj."""
        return self.module.rpartition(".")[2]


@dataclass(frozen=True)
class Adapted:
    """A Megatron weight with adapters. Each expert has an `Adapted` of its own."""

    owner: str  # the adapters' module, such as decoder.layers.0.self_attention.linear_qkv_lora
    index: str  # the expert's number, such as [3]; empty for other weights
    matrices: tuple[Matrix, ...]

    def key(self, matrix: Matrix, part: str) -> str:
        """Return the layout-independent name of A (if `part` is "a") or B ("b") of a matrix of this
        weight."""
        return f"{self.owner}.{matrix.leaf}.{part}{self.index}"


def matrices_of(recipe: TensorRecipe) -> list[Matrix]:
    """Return the matrices of the Hugging Face model that a weight consists of, or an empty list if
    the weight consists of other tensors. If the files have all experts of a layer in one tensor,
    each matrix of an expert has the name that it has in files with one tensor for each matrix."""
    matrices: dict[str, Matrix] = {}
    for box in recipe.boxes:
        if is_of_joint_experts(box):
            half = box.target[0] if len(box.target) == 3 else None
            leaf = "down_proj" if half is None else ("gate_proj", "up_proj")[half]
            name = f"{box.name.rpartition('.')[0]}.{box.source[0]}.{leaf}.weight"
            matrices[name] = Matrix(name, *box.size[-2:])
            continue
        if len(box.source) != 2 or not box.name.endswith(".weight"):
            return []
        rows, columns = (part.stop for part in box.source_slices)
        other = matrices.get(box.name, Matrix(box.name, 0, 0))  # from another box of the matrix
        matrices[box.name] = Matrix(box.name, max(other.rows, rows), max(other.columns, columns))
    return list(matrices.values())


def is_of_joint_experts(box: Box) -> bool:
    """Whether a box belongs to a tensor that holds all experts of a layer."""
    return len(box.source) == 3 and ".experts." in box.name


def place_in_joint(recipe: TensorRecipe, target: Sequence[int]) -> tuple[str, tuple[int, int]]:
    """Find the element `target` of an expert's weight in the matrices of the Hugging Face model.
    This is for files with all experts in one tensor. Returns the name of the matrix, and the row
    and column of the element in it. With Transformer Engine, gate and up projection are the halves
    of one weight."""
    matrices = matrices_of(recipe)
    rows = matrices[0].rows
    flat = target[0] * rows + target[1] if len(target) == 3 else target[0]
    half, row = divmod(flat, rows)
    return matrices[half].name, (row, target[-1])


def joint_matrices(
    adapted: Mapping[str, Adapted], weights: WeightMap, files: WeightMap
) -> dict[str, list[tuple[Box, Matrix]]]:
    """Return, for each tensor of `files` that holds all experts of a layer, its adapted matrices
    and their boxes. weights: the weight map that gave `adapted`."""
    joint: dict[str, list[tuple[Box, Matrix]]] = {}
    for name, each in adapted.items():
        boxes = [box for box in files.recipes[name].boxes if is_of_joint_experts(box)]
        order = matrices_of(weights.recipes[name]) if boxes else []
        for box in boxes:
            matrix = order[box.target[0] if len(box.target) == 3 else 0]
            if matrix in each.matrices:
                joint.setdefault(box.name, []).append((box, matrix))
    return joint


def merge_joint(
    data: Tensor,
    slices: Sequence[slice],
    parts: Sequence[tuple[Box, Tensor, Tensor]],
    scale: float,
    shape: Sequence[int],
) -> Tensor:
    """Add adapters to a block of a tensor that holds all experts, and return the sum. data: the
    block; slices: its place in the tensor; shape: the shape of the tensor; parts: box, A and B of
    each adapted matrix."""
    first, last, _ = slices[0].indices(shape[0])
    wide = data.clone() if data.dtype.itemsize >= 4 else data.float()
    for expert in range(first, last):
        change = wide.new_zeros(tuple(shape[1:]))
        for box, a, b in parts:
            if box.source[0] == expert:
                product = b.to(wide.dtype) @ a.to(wide.dtype)
                change[box.source_slices[1:]] = box.to_source(product)[0]
        wide[expert - first] += scale * change[tuple(slices[1:])]
    return wide.to(data.dtype)


def adapted_weights(weights: WeightMap, targets: Sequence[str]) -> dict[str, Adapted]:
    """The weights of a model that have adapters, by name. Raises ConfigError if a target names no
    matrix of the model."""
    adapted: dict[str, Adapted] = {}
    known: dict[str, None] = {}  # the targets that the model has, in order
    for name, recipe in weights.recipes.items():
        group, pair = _group(name), _with_adapters(name, recipe)
        if group is None or pair is None:
            continue
        module, weight = pair
        chosen = []
        for matrix in weight.matrices:
            names = {group, module, matrix.leaf} | ({ALL} if group in GROUPS else set())
            known |= dict.fromkeys(sorted(names))
            if not names.isdisjoint(targets):
                chosen.append(matrix)
        if chosen:
            adapted[name] = replace(weight, matrices=tuple(chosen))
    unknown = [target for target in targets if target not in known]
    if unknown:
        has_head = _HEAD_WEIGHT in weights.recipes
        raise ConfigError([_no_such_matrices(unknown, known, has_head=has_head)])
    return adapted


def _no_such_matrices(unknown: Sequence[str], known: Collection[str], *, has_head: bool) -> str:
    """The message about targets that the model does not have. known: the targets that the model
    has."""
    why, names = "the model has no such matrices", set(unknown)
    if names & {HEAD, "output_layer", "lm_head"} and not has_head:
        why = "the output layer is tied to the embedding, which has no adapters here"
    elif names & set(_EMBEDDING):
        why = "the embedding has no adapters here"
    hint = "".join(f"; {did_you_mean(close)}" for t in unknown if (close := nearest(t, known, 1)))
    return problem(
        "model.lora.targets", ", ".join(unknown), f"{why}; allowed: {', '.join(known)}{hint}"
    )


def _with_adapters(name: str, recipe: TensorRecipe) -> tuple[str, Adapted] | None:
    """Return the Megatron module of a weight, such as linear_fc1, and the weight with an adapter
    for each of its matrices. None: the weight cannot have adapters."""
    expert, linear = _EXPERT.match(name), _LINEAR.match(name)
    in_layers = name.startswith("decoder.layers.") or name == _HEAD_WEIGHT
    if not in_layers or (expert or linear) is None:
        return None
    matrices = tuple(matrices_of(recipe))
    if expert is not None:
        parent, number, index = expert.groups()
        # A matrix without the expert's number in its name belongs to several experts.
        matrices = matrices if all(f".{index}." in each.name for each in matrices) else ()
        module, weight = f"linear_fc{number}", Adapted(f"{parent}.lora", f"[{index}]", matrices)
    else:
        assert linear is not None
        parent, module = linear.groups()
        weight = Adapted(f"{parent}{module}_lora", "", matrices)
    return (module, weight) if matrices else None


_cache: dict[str, dict[str, Adapted]] = {}  # only the result for the last model


def adapted_weights_of(
    family: Family, shape: ModelShape, targets: Sequence[str]
) -> Mapping[str, Adapted]:
    """Return `adapted_weights` for a model of this shape. The last result is cached, because a
    search for layouts needs this result for the same model many times, and a large model has tens
    of thousands of matrices."""
    key = f"{family.model_type} {shape} {targets}"
    if key not in _cache:
        adapted = adapted_weights(weight_map(family, shape, shape.vocab_size or 1), targets)
        _cache.clear()
        _cache[key] = adapted
    return _cache[key]


def _group(name: str) -> str | None:
    """The group of targets (GROUPS) that a weight belongs to."""
    if name == _HEAD_WEIGHT:
        return HEAD
    if ".self_attention." in name:
        return "attention"
    if ".mlp.experts." in name or ".mlp.shared_experts." in name:
        return "experts"
    if ".mlp.router." in name:
        return "router"
    return "mlp" if ".mlp." in name else None


def merge(data: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return a block [rows, columns] of a matrix plus its adapter. The sum is computed in fp32 or
    wider, and rounded once. a: [rank, columns], b: [rows, rank]."""
    wide = data if data.dtype.itemsize >= 4 else data.float()
    return wide.addmm(b.to(wide.dtype), a.to(wide.dtype), alpha=scale).to(data.dtype)


def adapter_map(adapted: Mapping[str, Adapted], rank: int) -> WeightMap:
    """The map between the adapters' tensors in the model and those of a PEFT file."""
    recipes = dict(_recipes(adapted, rank))
    shapes = {box.name: box.size for recipe in recipes.values() for box in recipe.boxes}
    return WeightMap(recipes, shapes)


def _recipes(adapted: Mapping[str, Adapted], rank: int) -> Iterator[tuple[str, TensorRecipe]]:
    for weight in adapted.values():
        for matrix in weight.matrices:
            stem = f"{PEFT_PREFIX}{matrix.module}"
            yield weight.key(matrix, "a"), copy(f"{stem}.lora_A.weight", rank, matrix.columns)
            yield weight.key(matrix, "b"), copy(f"{stem}.lora_B.weight", matrix.rows, rank)
