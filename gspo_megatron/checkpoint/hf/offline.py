"""Conversion of files: a Hugging Face folder to a checkpoint of ours and back.

Without a GPU, Megatron-Core or process groups: both sides are files, and the map between them says
where every element goes. Tensors pass through in blocks, a few at a time, so memory does not grow
with the model. At the end the result is converted back and held against the source bit by bit.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gspo_megatron.checkpoint.folder import sync_file
from gspo_megatron.checkpoint.hf.arrangement import WeightMap, weight_map
from gspo_megatron.checkpoint.hf.checked import checked_folder, tied_copy
from gspo_megatron.checkpoint.hf.config import export_config
from gspo_megatron.checkpoint.hf.files import HfFolder, HfWriter, TensorSpec
from gspo_megatron.checkpoint.hf.offline_blocks import Filling, Parts, blocks, same_bits, workspace
from gspo_megatron.checkpoint.hf.offline_share import ALONE, Share, in_threads
from gspo_megatron.checkpoint.hf.offline_source import open_checkpoint
from gspo_megatron.checkpoint.hf.offline_tokenizer import check_tokenizer, tokenizer_files
from gspo_megatron.checkpoint.hf.offline_writer import write_torch_dist
from gspo_megatron.checkpoint.hf.pieces import Recipe, Slices
from gspo_megatron.checkpoint.hf.writer import MAX_SHARD_BYTES
from gspo_megatron.checkpoint.hf.writer_folder import NewFolder, copy_file, told, write_file
from gspo_megatron.checkpoint.manifest import MANIFEST, dump_manifest, record_of
from gspo_megatron.checkpoint.run_state import MODEL_FILE
from gspo_megatron.config.families import describe, family_of, family_of_shape
from gspo_megatron.config.shape import ModelShape, shape_of
from gspo_megatron.errors import ConfigError, DataError
from gspo_megatron.observe.progress import Progress

if TYPE_CHECKING:
    from gspo_megatron.checkpoint.hf.offline_reader import TorchDistReader

_MEGABYTE = 1_000_000
# With imports that take a second: they pass while something else is done.
_READER_MODULE = "gspo_megatron.checkpoint.hf.offline_reader"


def hf_to_megatron(
    source: Path,
    destination: Path,
    *,
    dtype: torch.dtype | None = None,
    ignore_custom_code: bool = False,
) -> None:
    """Convert a Hugging Face folder to a new checkpoint folder, which any layout loads.

    dtype: of all tensors but routers' biases (default: each keeps its own).

    Raises DataError with all that is wrong with the source before anything is written, and where
    the destination cannot be written.
    """
    folder, weights, shape, vocab_size = _open_hf(source, ignore_custom_code)
    recipes = _by_key(weights)
    specs = {
        key: TensorSpec(_wanted(key, dtype) or _dtype_of(recipe, folder), recipe.shape)
        for key, recipe in recipes.items()
    }
    total = sum(spec.bytes for spec in specs.values())
    make = Filling(recipes, folder).read_into
    with NewFolder(destination, total) as new:
        with told(destination), _meter("hf-to-megatron, MB", total) as done:
            files = {
                f"model/{name}": record
                for name, record in write_torch_dist(
                    new.partial / "model", specs, make, done=done
                ).items()
            }
        with told(destination):
            document = _model_document(shape, vocab_size, folder)
            write_file(new.partial / MODEL_FILE, json.dumps(document, indent=1) + "\n")
            (new.partial / "hf").mkdir()
            for file in folder.side_files:
                copy_file(file, new.partial / "hf")
        with ThreadPoolExecutor(1) as disk:  # waits for the disk meanwhile
            synced = disk.submit(_sync_files, new.partial, destination)
            reader = importlib.import_module(_READER_MODULE).TorchDistReader
            _verify_import(folder, weights, reader(new.partial / "model"))
            synced.result()
        with told(destination):
            for path in _files_of(new.partial):
                name = path.relative_to(new.partial).as_posix()
                files.setdefault(name, record_of(path))
            write_file(new.partial / MANIFEST, dump_manifest(files).decode())
        new.publish()


def _sync_files(folder: Path, destination: Path) -> None:
    with told(destination):
        for path in _files_of(folder):
            sync_file(path)


def _files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def megatron_to_hf(
    source: Path,
    destination: Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    share: Share = ALONE,
) -> list[str]:
    """Convert a checkpoint of ours, of any layout, to a new Hugging Face folder.

    source: a checkpoint folder, or a run's, then its newest whole checkpoint; dtype: of all tensors
    but routers' biases (default: each keeps its own). Every process of `share` calls it and
    converts files of its own. Returns notes for the user.

    Raises DataError with all that is wrong with the source before anything is written, ConfigError
    for a model that no family has, and DataError where the destination cannot be written.
    """
    with ThreadPoolExecutor(1) as other:
        importing = other.submit(importlib.import_module, _READER_MODULE)
        checkpoint = open_checkpoint(source, share)
        reader = importing.result().TorchDistReader(checkpoint.folder / "model")
    shape, vocab_size = checkpoint.shape, checkpoint.vocab_size
    original = checkpoint.hf_config
    family = family_of_shape(shape) if original is None else family_of(original)
    weights = weight_map(family, shape, vocab_size)
    recipes = _by_key(weights)
    _check_tensors(reader, recipes)
    parts = Parts(recipes, reader)
    specs = {}
    for name, hf_shape in weights.shapes.items():
        key = parts.key(name)
        specs[name] = TensorSpec(_wanted(key, dtype) or reader.tensors[key].dtype, hf_shape)
    main_dtype = specs[family.names["embedding"]].dtype
    config = export_config(shape, vocab_size, main_dtype, original)
    copies, notes = tokenizer_files(checkpoint)
    check_tokenizer(copies, vocab_size)
    total = sum(spec.bytes for spec in specs.values())
    if share.world_size > 1:
        max_shard_bytes = min(max_shard_bytes, -(-total // share.world_size))
    with HfWriter(
        destination,
        specs,
        max_shard_bytes=max_shard_bytes,
        owner=share.is_main,
        read_back=False,  # below, through the map
    ) as writer:
        share.barrier()
        mine = [name for file in _every(writer.files, share) for name in file.offsets]

        def write(name: str) -> None:
            for block in blocks(specs[name]):
                tensor = _buffer("block", block, specs[name].dtype)
                parts.read_into(name, block, tensor)
                writer.write(name, tensor, block[0].start)
                done(tensor.nbytes)

        with _meter("megatron-to-hf, MB", _bytes(specs, mine), share) as done:
            in_threads(write, mine)
        share.barrier()
        with ThreadPoolExecutor(1) as disk:  # waits for the disk meanwhile
            sealed = disk.submit(writer.seal, mine)
            _verify_export(reader, recipes, writer, share)
            sealed.result()
        share.barrier()
        if share.is_main:
            writer.publish({"config.json": config}, copies)
        share.barrier()
    return notes


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
            if not same_bits(folder.read(embedding.name, block), folder.read(copy, block)):
                raise DataError(
                    f"{source}: config.json says tie_word_embeddings, and {copy} differs from "
                    f"{embedding.name}"
                )
    return folder, weights, shape, preset.vocab_size


def _by_key(weights: WeightMap) -> dict[str, Recipe]:
    """The recipes by the keys of a checkpoint, where the experts of a layer are one tensor."""
    keys = dict.fromkeys(re.sub(r"\[\d+\]$", "", name) for name in weights.recipes)
    return {key: weights[key] for key in keys}


def _wanted(key: str, dtype: torch.dtype | None) -> torch.dtype | None:
    """The biases of routers stay what they are: Megatron-Core adds them up in fp32."""
    return None if key.endswith(".expert_bias") else dtype


def _dtype_of(recipe: Recipe, folder: HfFolder) -> torch.dtype:
    """One that holds all values, where the tensors that become one have several."""
    dtypes = {folder.tensors[box.name].dtype for box in recipe.boxes}
    result = dtypes.pop()
    for dtype in dtypes:
        result = torch.promote_types(result, dtype)
    return result


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


def _verify_import(folder: HfFolder, weights: WeightMap, written: TorchDistReader) -> None:
    """What was written, as HF tensors, is what was read."""
    recipes = _by_key(weights)
    _check_tensors(written, recipes)
    parts = Parts(recipes, written)
    specs = {name: folder.tensors[name] for name in weights.shapes}

    def compare(name: str) -> None:
        dtype = written.tensors[parts.key(name)].dtype
        for block in blocks(specs[name]):
            back = _buffer("back", block, dtype)
            parts.read_into(name, block, back)
            first = _buffer("first", block, specs[name].dtype)
            folder.read_into(name, block, first)
            _compare(name, back, first)
            done(first.nbytes)

    with _meter("verify, MB", _bytes(specs, specs)) as done:
        in_threads(compare, list(specs))


def _verify_export(
    reader: TorchDistReader, recipes: Mapping[str, Recipe], writer: HfWriter, share: Share
) -> None:
    """What was written, as Megatron tensors, is what was read."""
    back_again = Filling(recipes, writer)

    def compare(key: str) -> None:
        dtype = writer.tensors[recipes[key].boxes[0].name].dtype
        for block in blocks(reader.tensors[key]):
            back = _buffer("back", block, dtype)
            back_again.read_into(key, block, back)
            first = _buffer("first", block, reader.tensors[key].dtype)
            reader.read_into(key, block, first)
            _compare(key, back, first)
            done(first.nbytes)

    mine = _every(list(recipes), share)
    with _meter("verify, MB", _bytes(reader.tensors, mine), share) as done:
        in_threads(compare, mine)


def _compare(name: str, back: Tensor, first: Tensor) -> None:
    if not same_bits(back, first.to(back.dtype)):
        raise OSError(f"{name}: what was written is not what was read")


def _buffer(use: str, block: Slices, dtype: torch.dtype) -> Tensor:
    return workspace.empty(use, [part.stop - part.start for part in block], dtype)


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


def _bytes(specs: Mapping[str, TensorSpec], names: Any) -> int:
    return sum(specs[name].bytes for name in names)
