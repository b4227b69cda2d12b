"""Converts adapters: merges them into their base model and writes a Hugging Face folder, or
converts them from and to PEFT folders.

The adapters are held in memory. The base is read and written in blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gspo_megatron.checkpoint.convert import (
    Merge,
    by_key,
    checked_tensors,
    export_checkpoint,
    planned_tensors,
    write_checkpoint,
)
from gspo_megatron.checkpoint.convert_source import Source, open_checkpoint
from gspo_megatron.checkpoint.convert_workers import ALONE, WorkerShard, in_threads
from gspo_megatron.checkpoint.run_state import base_of, lora_of
from gspo_megatron.checkpoint.storage import Piece, TorchDistReader, read_index
from gspo_megatron.config.lora import LoraSection
from gspo_megatron.errors import DataError
from gspo_megatron.families import family_of
from gspo_megatron.families.adapter_map import (
    Adapted,
    adapted_weights,
    adapter_map,
    joint_matrices,
    merge,
    merge_joint,
)
from gspo_megatron.families.model_shape import shape_of
from gspo_megatron.families.weight_map import Box, WeightMap, split
from gspo_megatron.hf.adapters import PeftFolder, pairs_of, peft_layout, peft_maps, write_peft
from gspo_megatron.hf.files import HfFolder, checked_folder
from gspo_megatron.hf.side_files import export_config, generation_files
from gspo_megatron.hf.writer import HfWriter
from gspo_megatron.hub import folder_of


@dataclass(frozen=True)
class Adapters:
    """The adapters of a checkpoint. The keys of `tensors` are tensor names as in a PEFT file."""

    checkpoint: Source
    section: LoraSection
    base: dict[str, str]  # path and fingerprint of the base when training began, see `base_of`
    weights: WeightMap  # the map of the base
    adapted: dict[str, Adapted]
    tensors: dict[str, Tensor]

    def merging(self, files: WeightMap) -> Merge:
        """Return a function that adds the adapter to a block of a tensor of the base.

        files: the weight map of the files of the base. These files may hold all experts of a layer
        in one tensor.
        """
        pairs, scale = pairs_of(self.tensors), self.section.scale
        joint = {
            name: [(box, pairs[each.name][0], pairs[each.name][1]) for box, each in found]
            for name, found in joint_matrices(self.adapted, self.weights, files).items()
        }

        def add(name: str, slices: Sequence[slice], data: Tensor) -> Tensor:
            if name in joint:
                return merge_joint(data, slices, joint[name], scale, files.shapes[name])
            if name not in pairs:
                return data
            a, b = pairs[name]
            rows, columns = slices
            return merge(data, a[:, columns], b[rows], scale)

        return add


def any_to_hf(
    source: Path,
    destination: Path,
    *,
    as_peft: bool = False,
    base: Path | None = None,
    dtype: torch.dtype | None = None,
    shard: WorkerShard = ALONE,
) -> tuple[Path, list[str]]:
    """Convert a checkpoint, or the newest checkpoint of a run, as `megatron_to_hf` does. A
    checkpoint of adapters is merged into its base or, with `as_peft`, becomes a PEFT folder. Only
    the main process converts adapters."""
    checkpoint = open_checkpoint(source, shard)
    folder, section = checkpoint.folder, lora_of(checkpoint.document, checkpoint.folder)
    if section is None:
        if as_peft:
            raise DataError(f"{folder}: holds a whole model and no adapters; leave --adapter out")
        if base is not None:
            wrong = f"{folder} holds a whole model and no adapters; leave --base out"
            raise DataError(f"--base {base}: {wrong}")
        export_checkpoint(checkpoint, destination, dtype=dtype, shard=shard)
        return folder, checkpoint.notes
    if as_peft and base is not None:
        raise DataError(f"--base {base}: nothing reads it with --adapter; leave one of them out")
    with shard.barrier():
        if shard.is_main:
            adapters = _read_adapters(checkpoint, section)
            if as_peft:
                _adapters_to_peft(adapters, destination, dtype)
            else:
                _merged_to_hf(adapters, destination, base, dtype)
    return folder, checkpoint.notes


def _read_adapters(checkpoint: Source, section: LoraSection) -> Adapters:
    """Read the adapters of a checkpoint. Raises DataError if their files are damaged."""
    checkpoint.refuse_damage()  # open_checkpoint has not compared the checksums of the tensors
    weights = checkpoint.weights
    adapted = adapted_weights(weights, section.targets)
    recipes = by_key(adapter_map(adapted, section.rank))
    model = checkpoint.folder / "model"
    index = read_index(model)
    tensors: dict[str, Tensor] = {}
    for key, stored in checked_tensors(model, index, recipes).items():
        whole = torch.empty(stored.size, dtype=stored.properties.dtype)
        TorchDistReader(model, index).read([Piece.of_whole(key, whole)])
        for box in recipes[key].boxes:
            tensors[box.name] = whole[box.target_slices].reshape(box.source_size)
    return Adapters(checkpoint, section, checkpoint.document["base"], weights, adapted, tensors)


def _named_base(given: str, what: str) -> Path:
    """Return the folder of a base. `given` is a path or a name on the Hub. Raises DataError."""
    try:
        return folder_of(given, f"the base of {what}:", weights=True)
    except DataError as error:
        raise DataError(f"{error}; or give its folder with --base") from None


def _merged_to_hf(
    adapters: Adapters, destination: Path, base: Path | None, dtype: torch.dtype | None
) -> None:
    """Add the adapters to their base and write the result as a new Hugging Face folder. base: the
    path of the base, if it has moved; dtype: the dtype of the tensors (default: the dtype of the
    base).

    Raises DataError if `base` is not the model that the adapters were trained on.
    """
    place = base or _named_base(adapters.base["path"], "the adapters")
    if not place.is_dir():
        advice = "give its new folder with --base"
        wrong = "the model that the adapters were trained on is missing"
        raise DataError(f"{place}: {wrong}; {advice}")
    if base_of(place)["fingerprint"] != adapters.base["fingerprint"]:
        raise DataError(
            f"{place}: not the model that the adapters were trained on: its weights differ from "
            f"those of {adapters.base['path']} at that time; allowed: --base with that model"
        )
    if not (place / "config.json").is_file():
        merge_block = adapters.merging(adapters.weights)
        merged = _as_trained(open_checkpoint(place), adapters.checkpoint)
        export_checkpoint(merged, destination, dtype=dtype, merge=merge_block)
        return
    checkpoint = adapters.checkpoint
    folder, weights = checked_folder(  # code in the folder is ignored, as in training
        place, checkpoint.shape, checkpoint.vocab_size, ignore_custom_code=True
    )
    specs = planned_tensors(weights, dtype, folder.dtype_of)
    main = specs[family_of(folder.config).names["embedding"]].dtype
    config = export_config(checkpoint.shape, checkpoint.vocab_size, main, folder.config)
    merge_block = adapters.merging(weights)
    with HfWriter(destination, specs) as writer:

        def convert(name: str, done: Any) -> None:
            shape = weights.shapes[name]
            zeros = (0,) * len(shape)
            for box in split(Box(name, zeros, zeros, shape)):
                data = folder.read(name, box.source_slices)
                part = merge_block(name, box.source_slices, data).to(specs[name].dtype)
                writer.write(name, part, box.source_slices)
                done(box.numel)

        total = sum(spec.numel() for spec in specs.values())
        in_threads(convert, list(specs), "megatron-to-hf", "million weights", total)
        writer.finish()
        files = checkpoint.side_files or folder.side_files
        files = [file for file in files if file.name != "config.json"]
        writer.publish({"config.json": config, **generation_files(files)}, files)


def _as_trained(base: Source, trained: Source) -> Source:
    """Return the base with the settings and the tokenizer of the run that trained adapters for it.
    If the tokenizer of the run is missing, the tokenizer of the base is kept."""
    merged = replace(base, shape=trained.shape)
    if not trained.side_files:
        return merged
    return replace(merged, side_files=trained.side_files, is_imported=trained.is_imported)


def _adapters_to_peft(adapters: Adapters, destination: Path, dtype: torch.dtype | None) -> None:
    """Write adapters as a new PEFT folder."""
    tensors = {name: each.to(dtype or each.dtype) for name, each in adapters.tensors.items()}
    base, checkpoint = adapters.base["path"], adapters.checkpoint
    maps = peft_maps(checkpoint.family, checkpoint.shape, checkpoint.vocab_size)
    document, tensors = peft_layout(adapters.section, adapters.adapted, maps, tensors, base)
    write_peft(destination, tensors, document)


def peft_to_megatron(
    source: Path,
    destination: Path,
    *,
    base: Path | None = None,
    dtype: torch.dtype | None = None,
    ignore_custom_code: bool = False,
) -> None:
    """Convert a PEFT folder to a checkpoint of adapters. base: the Hugging Face folder of the base,
    if it is not at the path that the PEFT folder names; ignore_custom_code: for the folder of the
    base, as in `HfFolder`. Raises DataError with all problems, before anything is written."""
    folder = PeftFolder(source)
    place = base or _named_base(folder.base, str(source))
    if not (place / "config.json").is_file():
        raise DataError(
            f"{place}: not the Hugging Face folder of the model that {source} was made for; give "
            "that folder with --base"
        )
    model = HfFolder(place, ignore_custom_code=ignore_custom_code)
    preset = model.describe()
    shape, vocab_size = shape_of(preset), preset.vocab_size
    assert vocab_size is not None
    section = folder.settings()
    maps = peft_maps(family_of(model.config), shape, vocab_size)
    adapted = adapted_weights(maps[0], section.targets)
    adapters = adapter_map(adapted, section.rank)
    folder.open_joint(adapted, maps)
    folder.check(adapters)
    described = {"lora": section.model_dump(exclude={"checkpoint"}), "base": base_of(place)}
    write_checkpoint(destination, model, folder, by_key(adapters), dtype, described)
