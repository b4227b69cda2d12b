"""Mistakes in the weight map, one at a time: in the import, in the export, or in both."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from unittest import mock

from gspo_megatron.families.weight_map import Box, TensorRecipe, WeightMap
from gspo_megatron.hf import export, load

Rename = Callable[[Box], Box]


def _experts_swapped(box: Box) -> Box:
    one, other = ".experts.1.", ".experts.4."
    if one in box.name:
        return replace(box, name=box.name.replace(one, other))
    return replace(box, name=box.name.replace(other, one))


def _groups_of_keys_permuted(box: Box) -> Box:
    if not box.name.endswith("k_proj.weight"):
        return box
    rows, columns = box.source
    return replace(box, source=(box.size[0] - rows, columns))  # swaps the rows of two groups


MISTAKES: dict[str, Rename] = {
    "groups of keys permuted": _groups_of_keys_permuted,
    "two experts swapped": _experts_swapped,
}


def with_mistake(weights: WeightMap, rename: Rename) -> WeightMap:
    """The same map with boxes that `rename` has changed. The descriptions of the HF tensors stay
    right."""
    recipes = {
        name: TensorRecipe(recipe.shape, tuple(rename(box) for box in recipe.boxes))
        for name, recipe in weights.recipes.items()
    }
    return replace(weights, recipes=recipes)


@contextlib.contextmanager
def mistaken(name: str, *, importing: bool, exporting: bool) -> Iterator[None]:
    """A context in which import or export, or both, use a wrong map."""
    native_folder, native_map = load.checked_folder, export.weight_map

    def checked_folder(*args, **kwargs):
        folder, weights = native_folder(*args, **kwargs)
        return folder, with_mistake(weights, MISTAKES[name]) if importing else weights

    def weight_map(*args, **kwargs):
        weights = native_map(*args, **kwargs)
        return with_mistake(weights, MISTAKES[name]) if exporting else weights

    with (
        mock.patch.object(load, "checked_folder", checked_folder),
        mock.patch.object(export, "weight_map", weight_map),
    ):
        yield
