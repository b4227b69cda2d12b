"""Conversion of files: a Hugging Face folder to a checkpoint of ours and back.

Without a GPU, torch, Megatron-Core or process groups: both sides are files, and the map between
them says where every element goes. Pieces of tensors pass through, one in each thread, so memory
does not grow with the model. The checksum of each is kept from when it was read; in the end the
result is read back and held against them.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gspo_megatron.checkpoint.hf.arrangement import WeightMap, weight_map
from gspo_megatron.checkpoint.hf.checked import checked_folder, tied_copy
from gspo_megatron.checkpoint.hf.config import export_config
from gspo_megatron.checkpoint.hf.files import HfFolder, HfWriter, TensorSpec
from gspo_megatron.checkpoint.hf.files_header import name_of, torch_dtype
from gspo_megatron.checkpoint.hf.generation import generation_files
from gspo_megatron.checkpoint.hf.offline_blocks import (
    Piece,
    as_dtype,
    blocks,
    in_turns,
    pieces_of,
    workspace,
)
from gspo_megatron.checkpoint.hf.offline_reader import TorchDistReader
from gspo_megatron.checkpoint.hf.offline_share import ALONE, Share, in_threads, thread_count
from gspo_megatron.checkpoint.hf.offline_source import open_checkpoint
from gspo_megatron.checkpoint.hf.offline_tokenizer import check_tokenizer, tokenizer_files
from gspo_megatron.checkpoint.hf.offline_writer import TorchDistWriter
from gspo_megatron.checkpoint.hf.pieces import Recipe, Slices
from gspo_megatron.checkpoint.hf.writer import MAX_SHARD_BYTES
from gspo_megatron.checkpoint.hf.writer_folder import (
    NewFolder,
    copy_file,
    kept_on_disk,
    told,
    write_file,
)
from gspo_megatron.checkpoint.manifest import MANIFEST, dump_manifest, record_of
from gspo_megatron.checkpoint.run_state import MODEL_FILE
from gspo_megatron.config.families import describe, family_of, family_of_shape
from gspo_megatron.config.model_shape import ModelShape, shape_of
from gspo_megatron.errors import ConfigError, DataError
from gspo_megatron.observe.progress import Progress

_MEGABYTE = 1_000_000


def hf_to_megatron(
    source: Path,
    destination: Path,
    *,
    dtype: str | None = None,
    ignore_custom_code: bool = False,
) -> None:
    """Convert a Hugging Face folder to a new checkpoint folder, which any layout loads.

    dtype: of all tensors but routers' biases, as safetensors files call it (default: each keeps its
    own).

    Raises DataError with all that is wrong with the source before anything is written, and where
    the destination cannot be written; OSError where the disk gives back other bytes than it got.
    """
    folder, weights, shape, vocab_size = _open_hf(source, ignore_custom_code)
    recipes = _by_key(weights)
    specs = {
        key: TensorSpec(_wanted(key, dtype) or _dtype_of(recipe, folder), recipe.shape)
        for key, recipe in recipes.items()
    }
    pieces = _pieces(recipes, weights, folder.tensors)
    total = sum(spec.bytes for spec in specs.values())
    with NewFolder(destination, total) as new:
        with told(destination):
            document = _model_document(shape, vocab_size, folder)
            write_file(new.partial / MODEL_FILE, json.dumps(document, indent=1) + "\n")
            (new.partial / "hf").mkdir()
            for file in folder.side_files:
                copy_file(file, new.partial / "hf")
        model = new.partial / "model"
        with (
            TorchDistWriter(model, specs, thread_count(), destination) as writer,
            kept_on_disk(model, destination),
        ):
            pieces = in_turns(pieces, lambda piece: writer.file_of(*piece))
            checksums = _import(folder, pieces, specs, writer)
            records = writer.finish()
            _verify_import(model, specs, pieces, checksums)
        with told(destination):
            files = {f"model/{name}": record for name, record in records.items()}
            for path in sorted(path for path in new.partial.rglob("*") if path.is_file()):
                name = path.relative_to(new.partial).as_posix()
                if name not in files:
                    files[name] = record_of(path)
            write_file(new.partial / MANIFEST, dump_manifest(files).decode())
        new.publish()


def _import(
    folder: HfFolder,
    pieces: Sequence[Piece],
    specs: Mapping[str, TensorSpec],
    writer: TorchDistWriter,
) -> list[int]:
    """Returns the checksums of all pieces."""

    def convert(piece: Piece) -> int:
        key, box = piece
        entry, dtype = folder.tensors[box.name], specs[key].dtype
        data = workspace.bytes("piece", box.numel * entry.item_bytes)
        folder.read_into(box.name, box.source_slices, data)
        data = as_dtype(data, entry.dtype, dtype)
        done(len(data))
        return writer.write(key, box, data)

    with _meter("hf-to-megatron, MB", sum(spec.bytes for spec in specs.values())) as done:
        return in_threads(convert, pieces)


def _verify_import(
    folder: Path,
    specs: Mapping[str, TensorSpec],
    pieces: Sequence[Piece],
    checksums: Sequence[int],
) -> None:
    """What a reader of the result finds, by its own index, is what was read."""
    written = TorchDistReader(folder)
    if written.tensors != specs:
        raise OSError(f"{folder}: its index is not what was written")

    def compare(number: int) -> None:
        key, box = pieces[number]
        back = workspace.bytes("piece", box.numel * specs[key].item_bytes)
        if written.read_into(key, box.target_slices, back) != checksums[number]:
            raise OSError(f"{box.name}: what was written is not what was read")
        done(len(back))

    with _meter("verify, MB", sum(spec.bytes for spec in specs.values())) as done:
        in_threads(compare, range(len(pieces)))


def megatron_to_hf(
    source: Path,
    destination: Path,
    *,
    dtype: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    share: Share = ALONE,
) -> tuple[Path, list[str]]:
    """Convert a checkpoint of ours, of any layout, to a new Hugging Face folder.

    source: a checkpoint folder, or a run's (see `open_checkpoint`); dtype: of all tensors but
    routers' biases, as safetensors files call it (default: each keeps its own). Every process of
    `share` calls it and converts files of its own. Returns the checkpoint, and notes for the user.

    Raises DataError with all that is wrong with the source, before anything is written but for
    altered tensors, of which nothing is left either; ConfigError for a model that no family has,
    DataError where the destination cannot be written, and OSError where the disk gives back other
    bytes than it got.
    """
    checkpoint = open_checkpoint(source, share)
    reader = TorchDistReader(checkpoint.folder / "model")
    shape, vocab_size = checkpoint.shape, checkpoint.vocab_size
    original = checkpoint.hf_config
    family = family_of_shape(shape) if original is None else family_of(original)
    weights = weight_map(family, shape, vocab_size)
    recipes = _by_key(weights)
    _check_tensors(reader, recipes)
    keys = {box.name: key for key, recipe in recipes.items() for box in recipe.boxes}
    specs = {
        name: TensorSpec(
            _wanted(keys[name], dtype) or reader.tensors[keys[name]].dtype, weights.shapes[name]
        )
        for name in weights.shapes
    }
    main_dtype = specs[family.names["embedding"]].dtype
    config = export_config(shape, vocab_size, main_dtype, original)
    copies, notes = tokenizer_files(checkpoint)
    check_tokenizer(copies, vocab_size)
    total = sum(spec.bytes for spec in specs.values())
    if share.world_size > 1:
        max_shard_bytes = min(max_shard_bytes, -(-total // share.world_size))
    with HfWriter(
        destination, specs, max_shard_bytes=max_shard_bytes, owner=share.is_main
    ) as writer:
        share.barrier()
        mine = {name for file in _every(writer.files, share) for name in file.offsets}
        pieces = [p for p in _pieces(recipes, weights, specs) if p[1].name in mine]
        with kept_on_disk(writer.folder, destination):
            with _meter("megatron-to-hf, MB", _bytes(specs, mine), share) as done:

                def convert(piece: Piece) -> None:
                    key, box = piece
                    before, after = reader.tensors[key], specs[box.name]
                    data = workspace.bytes("piece", box.numel * before.item_bytes)
                    with checkpoint.damage_told():
                        crc32 = reader.read_into(key, box.target_slices, data)
                    same = before.dtype == after.dtype
                    data = as_dtype(data, before.dtype, after.dtype)
                    writer.write_rows(box.name, data, box.source[0], crc32 if same else None)
                    done(len(data))

                in_threads(convert, pieces)
                with checkpoint.damage_told():
                    checkpoint.choice.raise_for(reader.damage(checkpoint.unchecked))
            with _meter("verify, MB", _bytes(specs, mine), share) as done:
                writer.seal(mine, done)
        share.barrier()
        if share.is_main:
            # a folder that was imported says where an answer ends, in one of its two files
            made = generation_files(copies) if checkpoint.imported is None else {}
            writer.publish({"config.json": config, **made}, copies)
        share.barrier()
    return checkpoint.folder, [*checkpoint.choice.notes, *notes]


def _open_hf(source: Path, ignore_custom_code: bool) -> tuple[HfFolder, WeightMap, ModelShape, int]:
    opened = HfFolder(source, ignore_custom_code=ignore_custom_code)
    try:
        preset = describe(opened.config)
    except ConfigError as error:
        file = opened.path / "config.json"
        raise DataError("\n".join(f"{file}: {line}" for line in error.problems)) from None
    assert preset.vocab_size is not None
    shape = shape_of(preset)
    folder, weights = checked_folder(
        source, shape, preset.vocab_size, ignore_custom_code=ignore_custom_code
    )
    check_tokenizer(folder.side_files, preset.vocab_size)
    copy = tied_copy(weights, family_of(folder.config))
    if copy is not None and copy in folder.tensors:
        (embedding,) = weights.recipes["embedding.word_embeddings.weight"].boxes
        for block in blocks(folder.tensors[embedding.name]):
            if not _same(folder, embedding.name, copy, block):
                raise DataError(
                    f"{source}: config.json says tie_word_embeddings, and {copy} differs from "
                    f"{embedding.name}"
                )
    return folder, weights, shape, preset.vocab_size


def _by_key(weights: WeightMap) -> dict[str, Recipe]:
    """The recipes by the keys of a checkpoint, where the experts of a layer are one tensor."""
    keys = dict.fromkeys(re.sub(r"\[\d+\]$", "", name) for name in weights.recipes)
    return {key: weights[key] for key in keys}


def _pieces(
    recipes: Mapping[str, Recipe], weights: WeightMap, tensors: Mapping[str, TensorSpec]
) -> list[Piece]:
    """All pieces of a model; `tensors` are those of Hugging Face."""
    pieces = pieces_of(recipes, tensors)
    counts: Counter[str] = Counter()
    for key, box in pieces:
        counts[key] += box.numel
        counts[box.name] += box.numel
    shapes = {key: recipe.shape for key, recipe in recipes.items()} | dict(weights.shapes)
    assert counts == {name: math.prod(shape) for name, shape in shapes.items()}, "gaps or overlaps"
    return pieces


def _same(folder: HfFolder, one: str, other: str, block: Slices) -> bool:
    """Whether a block of two tensors has the same bits in both."""
    size = folder.tensors[one].item_bytes * math.prod(part.stop - part.start for part in block)
    buffers = [workspace.bytes(use, size) for use in ("piece", "back")]
    for name, buffer in zip((one, other), buffers, strict=True):
        folder.read_into(name, block, buffer)
    return buffers[0].tobytes() == buffers[1].tobytes()


def _wanted(key: str, dtype: str | None) -> str | None:
    """The biases of routers stay what they are: Megatron-Core adds them up in fp32."""
    return None if key.endswith(".expert_bias") else dtype


def _dtype_of(recipe: Recipe, folder: HfFolder) -> str:
    """One that holds all values, where the tensors that become one have several."""
    dtypes = {folder.tensors[box.name].dtype for box in recipe.boxes}
    if len(dtypes) == 1:
        return dtypes.pop()
    import torch

    return name_of(functools.reduce(torch.promote_types, map(torch_dtype, sorted(dtypes))))


def _model_document(shape: ModelShape, vocab_size: int, folder: HfFolder) -> dict[str, Any]:
    return {
        "shape": dataclasses.asdict(shape),
        "vocab_size": vocab_size,
        "tokenizer": None,  # in hf/, where there is one
        "hf": folder.config,
    }


def _check_tensors(reader: TorchDistReader, recipes: Mapping[str, Recipe]) -> None:
    problems = []
    for key, recipe in recipes.items():
        spec = reader.tensors.get(key)
        if spec is None:
            problems.append(f"{reader.folder}: {key} is missing")
        elif spec.shape != recipe.shape:
            problems.append(
                f"{reader.folder}: {key} has the shape {list(spec.shape)}; model.json says "
                f"{list(recipe.shape)}"
            )
    problems += [
        f"{reader.folder}: {key} belongs to nothing in the model that model.json describes"
        for key in reader.tensors
        if key not in recipes
    ]
    if problems:
        raise DataError("\n".join(problems))


@contextmanager
def _meter(title: str, total: int, share: Share = ALONE) -> Iterator[Callable[[int], None]]:
    """A progress bar over so many bytes; yields what counts them, from any thread."""
    lock = threading.Lock()
    count = 0
    size = max(1, total // _MEGABYTE)

    def done(more: int) -> None:
        nonlocal count
        with lock:
            count += more
            bar.update(size if count >= total else min(size - 1, count // _MEGABYTE), {})

    with Progress(size, title, enabled=share.is_main) as bar:
        yield done


def _every(items: Sequence[Any], share: Share) -> list[Any]:
    return list(items[share.rank :: share.world_size])


def _bytes(specs: Mapping[str, TensorSpec], names: Iterable[str]) -> int:
    return sum(specs[name].bytes for name in names)
