"""The map covers both sides once, whatever the family."""

from __future__ import annotations

import pytest
import torch

from gspo_megatron.checkpoint.hf.arrangement import WeightMap, weight_map
from gspo_megatron.config.families import describe, family_of
from gspo_megatron.config.model_shape import shape_of
from tests.unit.checkpoint.hf.published import CONFIGS, VOCABULARY, model_config, tensor_shapes


def _map(family: str, tied: bool) -> WeightMap:
    config = model_config(family, tie_word_embeddings=tied)
    return weight_map(family_of(config), shape_of(describe(config)), VOCABULARY)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", CONFIGS)
def test_it_knows_the_published_tensors(family: str, tied: bool) -> None:
    config = model_config(family, tie_word_embeddings=tied)
    assert dict(_map(family, tied).shapes) == tensor_shapes(config)


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


@pytest.mark.parametrize("family", CONFIGS)
def test_both_directions_are_the_same_boxes(family: str) -> None:
    weights = _map(family, tied=False)
    found = {(name, box) for boxes in weights.made_of.values() for name, box in boxes}
    assert found == {(name, box) for name, r in weights.recipes.items() for box in r.boxes}
    assert all(box.name == name for name, boxes in weights.made_of.items() for _, box in boxes)


def test_layers_come_in_order() -> None:
    layers = [
        int(name.split(".")[2])
        for name in _map("qwen3_moe", tied=False).shapes
        if ".layers." in name
    ]
    assert layers == sorted(layers)
