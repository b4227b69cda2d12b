"""The weight map: its recipes give the same tensors as torch's operations on whole tensors, and
they cover every element once."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gspo_megatron.families import describe, family_of
from gspo_megatron.families import weight_map as module
from gspo_megatron.families.model_shape import shape_of
from gspo_megatron.families.weight_map import (
    TensorRecipe,
    WeightMap,
    concatenate,
    copy,
    fill,
    flatten,
    interleave,
    stack,
    weight_map,
)
from tests.unit.hf.published import CONFIGS, VOCABULARY, model_config

Parts = dict[str, Tensor]


def _qkv() -> tuple[TensorRecipe, Parts, Callable[[Parts], Tensor]]:
    parts = {"q": torch.randn(24, 7), "k": torch.randn(8, 7), "v": torch.randn(12, 7)}
    recipe = interleave([copy(name, *part.shape) for name, part in parts.items()], groups=4)

    def whole(p: Parts) -> Tensor:
        by_group = [part.view(4, -1, 7) for part in p.values()]
        return torch.cat(by_group, dim=1).reshape(-1, 7)

    return recipe, parts, whole


def _bias() -> tuple[TensorRecipe, Parts, Callable[[Parts], Tensor]]:
    parts = {"q": torch.randn(24), "k": torch.randn(8), "v": torch.randn(8)}
    recipe = interleave([copy(name, len(part)) for name, part in parts.items()], groups=2)
    return recipe, parts, lambda p: torch.cat([x.view(2, -1) for x in p.values()], 1).flatten()


def _gate_up() -> tuple[TensorRecipe, Parts, Callable[[Parts], Tensor]]:
    parts = {"gate": torch.randn(9, 5), "up": torch.randn(9, 5)}
    recipe = concatenate([copy("gate", 9, 5), copy("up", 9, 5)])
    return recipe, parts, lambda p: torch.cat([p["gate"], p["up"]])


def _experts(flat: bool) -> tuple[TensorRecipe, Parts, Callable[[Parts], Tensor]]:
    names = [(f"{e}.gate", f"{e}.up") for e in range(3)]
    parts = {name: torch.randn(4, 6) for pair in names for name in pair}
    each = [stack([copy(gate, 4, 6), copy(up, 4, 6)]) for gate, up in names]
    recipe = stack([flatten(one) for one in each] if flat else each)

    def whole(p: Parts) -> Tensor:
        stacked = torch.stack([torch.stack([p[gate], p[up]]) for gate, up in names])
        return stacked.flatten(1, 2) if flat else stacked

    return recipe, parts, whole


def _interleaved() -> tuple[TensorRecipe, Parts, Callable[[Parts], Tensor]]:
    """The recipe of two experts in the first layer of gpt-oss."""
    config = model_config("gpt_oss")
    recipes = _map("gpt_oss", tied=False).recipes
    hidden, width = config["hidden_size"], config["intermediate_size"]
    name = "model.layers.0.mlp.experts.gate_up_proj"
    parts = {name: torch.randn(config["num_local_experts"], hidden, 2 * width)}
    recipe = stack([recipes[f"decoder.layers.0.mlp.experts.weight1[{n}]"] for n in (1, 4)])

    def whole(p: Parts) -> Tensor:
        by_half = [p[name][n].T for n in (1, 4)]
        return torch.stack([torch.stack([rows[::2], rows[1::2]]) for rows in by_half])

    return recipe, parts, whole


CASES = {
    "copy": lambda: (copy("a", 5, 3, 4), {"a": torch.randn(5, 3, 4)}, lambda p: p["a"]),
    "queries, keys and values": _qkv,
    "their biases": _bias,
    "gate over up": _gate_up,
    "experts, gate and up apart": lambda: _experts(flat=False),
    "experts, gate over up": lambda: _experts(flat=True),
    "experts, gate and up in turn": _interleaved,
}


def _random_slices(draw: random.Random, shape: tuple[int, ...], beyond: int) -> list[slice]:
    bounds = [
        sorted(draw.sample(range(n + 1 + (beyond if axis == 0 else 0)), 2))
        for axis, n in enumerate(shape)
    ]
    return [slice(*pair) for pair in bounds]


@pytest.mark.parametrize("at_once", [2**24, 11])
@pytest.mark.parametrize("name", CASES)
def test_any_slice_is_that_of_the_whole_tensor(
    name: str, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_ELEMENTS", at_once)
    torch.manual_seed(1)
    draw = random.Random(name)
    recipe, parts, whole = CASES[name]()
    expected = whole(parts)
    assert recipe.shape == expected.shape
    padding = 3 if expected.dim() < 3 else 0
    padded = torch.cat([expected, expected.new_zeros(padding, *expected.shape[1:])])
    for _ in range(200):
        slices = _random_slices(draw, recipe.shape, padding)
        wanted = padded[tuple(slices)]
        read = 0

        def reader(part: str, where: tuple[slice, ...]) -> Tensor:
            nonlocal read
            found = parts[part][where]
            sizes = tuple(len(range(s.start, s.stop, s.step or 1)) for s in where)
            assert found.shape == sizes, "beyond the tensor"
            read += found.numel()
            assert found.numel() <= at_once or found.shape[0] == 1
            return found

        out = torch.full_like(wanted, float("nan"))
        fill(out, recipe, slices, reader)
        assert torch.equal(out, wanted)
        inside = tuple(slice(s.start, min(s.stop, n)) for s, n in zip(slices, recipe.shape))
        assert read == expected[inside].numel(), "more than the slice was read"


@pytest.mark.parametrize("name", CASES)
def test_the_way_back_from_shards_in_any_cut(name: str) -> None:
    torch.manual_seed(2)
    draw = random.Random(name)
    recipe, parts, whole = CASES[name]()
    tensor = whole(parts)
    for _ in range(20):
        cuts = [
            sorted({0, n, *draw.sample(range(n + 1), min(2, n))}) for n in recipe.shape
        ]  # a grid of shards
        grid: list[list[slice]] = [[]]
        for edges in cuts:
            ranges = [slice(a, b) for a, b in zip(edges, edges[1:])]
            grid = [[*left, part] for left in grid for part in ranges]
        outs = {part: torch.full_like(value, float("nan")) for part, value in parts.items()}
        for slices in grid:
            shard = tensor[tuple(slices)].clone()
            for box in recipe.cut(slices):
                part = box.to_source(shard[box.target_slices])
                outs[box.name][box.source_slices].copy_(part)
        reached = {part: ~value.isnan() for part, value in outs.items()}
        assert sum(int(places.sum()) for places in reached.values()) == tensor.numel()
        for part, value in parts.items():
            assert torch.equal(outs[part][reached[part]], value[reached[part]])


def test_other_dtypes_are_converted_and_bits_of_the_same_kept() -> None:
    values = torch.randn(6, 4).to(torch.bfloat16)
    values[0, 0] = float("nan")
    out = torch.empty(8, 4)
    fill(out, copy("a", 6, 4), [slice(0, 8), slice(0, 4)], lambda _, where: values[where])
    assert torch.equal(out[:6].view(torch.int32), values.float().view(torch.int32))
    same = torch.empty(6, 4, dtype=torch.bfloat16)
    fill(same, copy("a", 6, 4), [slice(0, 6), slice(0, 4)], lambda _, where: values[where])
    assert torch.equal(same.view(torch.int16), values.view(torch.int16))


def _map(family: str, tied: bool) -> WeightMap:
    config = model_config(family, tie_word_embeddings=tied)
    return weight_map(family_of(config), shape_of(describe(config)), VOCABULARY)


@pytest.mark.parametrize("family", CONFIGS)
def test_every_element_of_both_sides_is_mapped_once(family: str) -> None:
    weights = _map(family, tied=False)
    theirs = {name: torch.zeros(shape) for name, shape in weights.shapes.items()}
    for recipe in weights.recipes.values():
        ours = torch.zeros(recipe.shape)
        for box in recipe.boxes:
            ours[box.target_slices] += 1
            theirs[box.name][box.source_slices] += 1
        assert torch.equal(ours, torch.ones(recipe.shape))
    assert all(torch.equal(count, torch.ones_like(count)) for count in theirs.values())


def test_layers_come_in_order() -> None:
    layers = [
        int(name.split(".")[2])
        for name in _map("qwen3_moe", tied=False).shapes
        if ".layers." in name
    ]
    assert layers == sorted(layers)


def test_biases_of_experts_by_the_names_of_transformer_engine() -> None:
    """In Transformer Engine, the gate and up biases of an expert are one vector. In a checkpoint,
    one tensor contains the biases of all experts."""
    weights, start = _map("gpt_oss", tied=False), "decoder.layers.1.mlp.experts."
    width, hidden, experts = (
        CONFIGS["gpt_oss"][key] for key in ("intermediate_size", "hidden_size", "num_local_experts")
    )
    one, all_of = weights[f"{start}experts.linear_fc1.bias[3]"], weights[f"{start}bias1"]
    assert (one.shape, all_of.shape) == ((2 * width,), (experts, 2, width))
    assert weights[f"{start}experts.linear_fc2.bias"].shape == (experts, hidden)
    assert [(box.source, box.target, box.step) for box in one.boxes] == [
        ((3, 0), (0,), 2),
        ((3, 1), (width,), 2),
    ]
