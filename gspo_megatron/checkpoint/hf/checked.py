"""A Hugging Face folder held against the model that its weights are for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from gspo_megatron.checkpoint.hf.arrangement import WeightMap, weight_map
from gspo_megatron.checkpoint.hf.files import HfFolder
from gspo_megatron.config.families import Family, describe, family_of
from gspo_megatron.config.model_shape import ModelShape, shape_conflicts
from gspo_megatron.config.problems import format_value
from gspo_megatron.errors import ConfigError, DataError

_DTYPES = ("BF16", "F16", "F32", "F64")  # of weights


def checked_folder(
    path: str | Path,
    shape: ModelShape,
    vocab_size: int,
    *,
    ignore_custom_code: bool = False,
) -> tuple[HfFolder, WeightMap]:
    """The folder and the map of its model, which is one of `shape` and a vocabulary of
    `vocab_size`.

    Raises DataError with all that is wrong: config.json describes another model; tensors that are
    missing, that nothing takes, or of another shape. No tensor is read for it.
    """
    folder = HfFolder(path, ignore_custom_code=ignore_custom_code)
    file = folder.path / "config.json"
    try:
        family, preset = family_of(folder.config), describe(folder.config)
    except ConfigError as error:
        raise DataError("\n".join(f"{file}: {line}" for line in error.problems)) from None
    problems = [
        f"{file}: {key} is {format_value(theirs)}, and {format_value(ours)} in the model"
        for key, ours, theirs in shape_conflicts(replace(shape, vocab_size=vocab_size), preset)
    ]
    if problems:
        raise DataError("\n".join(problems))
    weights = weight_map(family, shape, vocab_size)
    problems = list(_tensor_problems(folder, weights, family))
    if problems:
        raise DataError("\n".join(problems))
    return folder, weights


def _tensor_problems(folder: HfFolder, weights: WeightMap, family: Family) -> Iterator[str]:
    for name, shape in weights.shapes.items():
        entry = folder.tensors.get(name)
        if entry is None:
            yield f"{folder.path}: {name} is missing"
        elif entry.shape != shape:
            yield (
                f"{folder.path}: {name} has the shape {list(entry.shape)}; config.json says "
                f"{list(shape)}"
            )
        elif entry.dtype not in _DTYPES:
            yield f"{folder.path}: {name} has the dtype {entry.dtype}; legal: {', '.join(_DTYPES)}"
    for name in folder.tensors:
        if name not in weights.shapes and not is_unread(name, weights, family):
            yield f"{folder.path}: {name} is no part of the model that config.json describes"


def is_unread(name: str, weights: WeightMap, family: Family) -> bool:
    """Whether a tensor of a folder says nothing that the others do not: a constant, or a second
    copy of the embedding where it is tied."""
    return name.endswith(family.unread) or name == tied_copy(weights, family)


def tied_copy(weights: WeightMap, family: Family) -> str | None:
    """The name under which a folder may hold the tied embedding once more."""
    head = family.names["head"]
    return None if head in weights.shapes else head
