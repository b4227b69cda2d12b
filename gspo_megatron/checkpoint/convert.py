"""Converts a Hugging Face folder to a checkpoint, and a checkpoint to a Hugging Face folder.

This needs no GPU, no Megatron-Core and no memory for the whole model: a few threads convert one
block of a tensor each. torch.distributed.checkpoint (DCP) reads and writes the checkpoints.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import json
import os
import re
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.serialization import set_crc32_options

from gspo_megatron.checkpoint.convert_source import (
    Source,
    holds_tensors,
    open_checkpoint,
)
from gspo_megatron.checkpoint.convert_workers import (
    ALONE,
    Done,
    WorkerShard,
    in_threads,
    thread_count,
)
from gspo_megatron.checkpoint.folder import write_file
from gspo_megatron.checkpoint.manifest import (
    MANIFEST,
    FileRecord,
    Files,
    dump_manifest,
    files_below,
    read_manifest,
    record_of,
)
from gspo_megatron.checkpoint.run_state import MODEL_FILE
from gspo_megatron.checkpoint.storage import (
    Piece,
    SavePlanner,
    TorchDistReader,
    TorchDistWriter,
    operating_system_errors,
    read_index,
    tensors_of,
)
from gspo_megatron.errors import DataError, some_of
from gspo_megatron.families.model_shape import shape_of
from gspo_megatron.families.weight_map import (
    Box,
    TensorRecipe,
    WeightMap,
    fill,
    is_never_rounded,
)
from gspo_megatron.files import SETTLED, os_errors, settle
from gspo_megatron.hf.files import DTYPES, HfFolder, check_tied_copy, checked_weights
from gspo_megatron.hf.side_files import (
    check_tokenizer,
    export_config,
    generation_files,
    with_padding,
)
from gspo_megatron.hf.writer import MAX_SHARD_BYTES, HfWriter, NewFolder, copy_file

Merge = Callable[[str, Sequence[slice], Tensor], Tensor]
_FILE_BYTES = 4 << 30  # size of a checkpoint's files; the disk syncs one while others are written
_BLOCK_BYTES = 16 << 20  # size of a block; the memory of larger blocks would not be reused
_READ_BYTES = 4 << 20  # bytes read from a file at a time
# The last bytes that were read stay in the page cache, because their blocks may not be converted
# yet. All bytes before them are dropped from the page cache.
_BEHIND_BYTES = 256 << 20


def hf_to_megatron(
    source: Path,
    destination: Path,
    *,
    dtype: torch.dtype | None = None,
    ignore_custom_code: bool = False,
) -> None:
    """Convert a Hugging Face folder to a new checkpoint folder, which any layout loads.

    dtype: the new dtype of all tensors except those that are never rounded (`is_never_rounded`). By
    default each tensor keeps its dtype.

    Raises DataError with all problems of the source, before anything is written. Also raises
    DataError if the destination cannot be written.
    """
    folder = HfFolder(source, ignore_custom_code=ignore_custom_code)
    preset = folder.describe()
    shape, vocab_size = shape_of(preset), preset.vocab_size
    assert vocab_size is not None
    weights = checked_weights(folder, shape, vocab_size)
    check_tokenizer(folder.side_files, vocab_size)
    check_tied_copy(folder, weights)
    write_checkpoint(destination, folder, folder, by_key(weights), dtype)


def write_checkpoint(
    destination: Path,
    model: HfFolder,
    source: HfFolder,
    recipes: Mapping[str, TensorRecipe],
    dtype: torch.dtype | None,
    adapters: Mapping[str, Any] | None = None,
) -> None:
    """Write a new checkpoint folder.

    model: the folder with the model's settings and tokenizer; source: the folder with the tensors;
    recipes: by the keys of the checkpoint; dtype: as in `hf_to_megatron`; adapters: the keys of
    model.json that describe adapters."""
    preset, pieces = model.describe(), []
    for key, recipe in recipes.items():
        dtypes = {source.dtype_of(box.name) for box in recipe.boxes}
        # the smallest dtype that holds the values of all boxes exactly
        smallest = functools.reduce(torch.promote_types, dtypes)
        planned = torch.empty(recipe.shape, dtype=_wanted(key, dtype) or smallest, device="meta")
        pieces.append(Piece.of_whole(key, planned))
    document = {
        "shape": dataclasses.asdict(shape_of(preset)),
        "vocab_size": preset.vocab_size,
        "tokenizer": None,  # the tokenizer's files are in hf/, if there are any
        "hf": model.config,
        **(adapters or {}),
    }

    def read(block: Piece) -> Tensor:
        # empty_like of a tensor on the meta device would import modules that take 125 MB of memory.
        out = torch.empty(block.data.shape, dtype=block.data.dtype)
        fill(out, recipes[block.key], block.slices, source.read)
        return out

    total = sum(piece.data.nbytes for piece in pieces)
    with NewFolder(destination, total) as new, os_errors(destination, "cannot be written"):
        write_file(new.partial / MODEL_FILE, f"{json.dumps(document, indent=1)}\n".encode())
        (new.partial / "hf").mkdir()
        for file in model.side_files:
            copy_file(file, new.partial / "hf")
        planner = SavePlanner(pieces, _BLOCK_BYTES, read)
        records = _write_model(new.partial / "model", planner, total)
        files = {f"model/{name}": record for name, record in records.items()}
        for name in files_below(new.partial):
            files[name] = files.get(name) or record_of(new.partial / name)
        write_file(new.partial / MANIFEST, dump_manifest(files))
        new.publish()


def _write_model(folder: Path, planner: SavePlanner, total: int) -> Files:
    """Write the tensors of `planner`, which have `total` bytes, into several files at a time.
    Returns the size and checksum of each file. DCP's own write_data is not used, because it keeps
    the last block of every tensor in memory until a file is complete."""
    writer, plan = TorchDistWriter(folder), planner.create_local_plan()
    writer.prepare_local_plan(plan)
    _, index = planner.create_global_plan([plan])
    count = max(thread_count(), -(-total // _FILE_BYTES))
    files: list[list[WriteItem]] = [[] for _ in range(count)]
    written = 0
    for item in plan.items:
        files[written * count // max(1, total)].append(item)
        written += planner.bytes_of(item)
    results: list[WriteResult] = []
    records: Files = {}

    def write(number: int, done: Done) -> None:
        name = f"__0_{number}.distcp"
        with operating_system_errors(), _ModelFile(folder / name) as file:
            for item in files[number]:
                start = file.size
                torch.save(planner.resolve_data(item), file)
                place = _StorageInfo(name, start, file.size - start)
                results.append(WriteResult(item.index, place.length, place))
                done(planner.bytes_of(item))
            settle(file.fileno())
        records[name] = FileRecord(file.size, f"{file.crc32:08x}")

    numbers = [number for number in range(count) if files[number]]
    set_crc32_options(compute_crc32=False)  # the manifest has a checksum of every file
    try:
        in_threads(write, numbers, "hf-to-megatron", "MB", total)
    finally:
        set_crc32_options(compute_crc32=True)
    writer.finish(index, [results])
    return records


class _ModelFile(io.FileIO):
    """A new file that torch.save writes sequentially. `size` and `crc32` are the number and the
    checksum of the bytes written so far."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "x")
        self.size, self.crc32, self._settled = 0, 0, 0

    def write(self, data: Any) -> int:
        self.crc32 = zlib.crc32(data, self.crc32)
        left = memoryview(data)
        while left:
            left = left[super().write(left) :]
        self.size += len(data)
        if self.size - self._settled >= SETTLED:
            settle(self.fileno())
            self._settled = self.size
        return len(data)


def megatron_to_hf(
    source: Path,
    destination: Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    shard: WorkerShard = ALONE,
) -> tuple[Path, list[str]]:
    """Convert a checkpoint, saved on any layout, to a new Hugging Face folder.

    source: a checkpoint or a run folder (see `open_checkpoint`); dtype: as in `hf_to_megatron`.
    Every process of `shard` must call this function. Each one writes files of its own. Returns the
    checkpoint's folder, and notes for the user.

    Raises the errors of `hf_to_megatron`, and ConfigError if the model belongs to no family.
    """
    checkpoint = open_checkpoint(source, shard)
    export_checkpoint(
        checkpoint, destination, dtype=dtype, max_shard_bytes=max_shard_bytes, shard=shard
    )
    return checkpoint.folder, checkpoint.notes


def export_checkpoint(
    checkpoint: Source,
    destination: Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    shard: WorkerShard = ALONE,
    merge: Merge = lambda _name, _slices, data: data,
) -> None:
    """Write `checkpoint`, a whole model, as a new Hugging Face folder. merge(name, slices, data): a
    function that returns the values to write for a block of a Hugging Face tensor."""
    model = checkpoint.folder / "model"
    index = read_index(model)
    shape, vocab_size = checkpoint.shape, checkpoint.vocab_size
    records = None  # several processes have already compared the checksums
    if shard.world_size == 1:
        files = read_manifest(checkpoint.folder)
        records = {Path(name).name: files[name] for name in files if holds_tensors(name)}
    weights = checkpoint.weights
    recipes = by_key(weights)
    stored = checked_tensors(model, index, recipes)
    keys = {box.name: key for key, recipe in recipes.items() for box in recipe.boxes}
    specs = planned_tensors(weights, dtype, lambda name: stored[keys[name]].properties.dtype)
    main_dtype = specs[checkpoint.family.names["embedding"]].dtype
    config = export_config(shape, vocab_size, main_dtype, checkpoint.hf_config)
    check_tokenizer(checkpoint.side_files, vocab_size)
    total = sum(spec.nbytes for spec in specs.values())
    if shard.world_size > 1:
        max_shard_bytes = min(max_shard_bytes, -(-total // shard.world_size))
    writer = HfWriter(destination, specs, max_shard_bytes=max_shard_bytes, owner=shard.is_main)
    with contextlib.ExitStack() as stack:
        with shard.barrier():
            stack.enter_context(writer)
        with shard.barrier():
            mine = writer.files[shard.rank :: shard.world_size]
            names = {name for file in mine for name in file.offsets}
            try:
                _export(model, index, recipes, writer, names, records, shard.is_main, merge)
            except DataError:
                if records is not None:  # report the damage of the other files, too
                    checkpoint.refuse_damage()
                raise
            writer.finish(mine)
        with shard.barrier():
            if shard.is_main:
                # An export of an imported model makes no generation_config.json. It copies the file
                # of the imported folder, if the folder has one.
                files = checkpoint.side_files
                made = {} if checkpoint.is_imported else generation_files(files)
                writer.publish({"config.json": with_padding(config, files), **made}, files)


def planned_tensors(
    weights: WeightMap, dtype: torch.dtype | None, kept: Callable[[str], torch.dtype]
) -> dict[str, Tensor]:
    """Return the tensors of a Hugging Face folder, on the meta device. dtype: as in
    `hf_to_megatron`; kept(name): a function that returns the present dtype of a tensor."""
    dtypes = {b.name: _wanted(key, dtype) for key, r in weights.recipes.items() for b in r.boxes}
    return {
        name: torch.empty(size, dtype=dtypes[name] or kept(name), device="meta")
        for name, size in weights.shapes.items()
    }


def _export(
    folder: Path,
    index: Metadata,
    recipes: Mapping[str, TensorRecipe],
    writer: HfWriter,
    names: set[str],
    records: Files | None,
    progress: bool,
    merge: Merge,
) -> None:
    """Read once each stored block that the Hugging Face tensors `names` need, and write its parts.
    records: see `_in_file_order`."""
    reader = TorchDistReader(folder, index)
    work: dict[str, list[_Block]] = defaultdict(list)  # by file
    stored = tensors_of(index)
    for key, recipe in recipes.items():
        entry = stored[key]
        for chunk in entry.chunks:
            planned = torch.empty(chunk.sizes, dtype=entry.properties.dtype, device="meta")
            piece = Piece(key, planned, tuple(entry.size), tuple(chunk.offsets))
            boxes = [box for box in recipe.cut(piece.slices) if box.name in names]
            if boxes:
                place = index.storage_data[MetadataIndex(key, chunk.offsets)]
                block = _Block(place.offset, place.length, piece, boxes)
                work[place.relative_path].append(block)

    def convert(block: _Block, done: Done) -> None:
        data = torch.empty(block.piece.data.shape, dtype=block.piece.data.dtype)
        reader.read([replace(block.piece, data=data)])
        for box in block.boxes:
            part = box.to_source(data[box.target_slices])
            writer.write_box(box, merge(box.name, box.source_slices, part))
        done(block.numel)

    total = sum(block.numel for blocks in work.values() for block in blocks)
    blocks = _in_file_order(folder, work, records)
    in_threads(convert, blocks, "megatron-to-hf", "million weights", total, enabled=progress)


@dataclass(frozen=True)
class _Block:
    """A block of a checkpoint: its place in its file, its place in its tensor (`piece`, without
    values), and the boxes of Hugging Face tensors that it becomes."""

    offset: int
    length: int
    piece: Piece
    boxes: list[Box]

    @property
    def numel(self) -> int:
        return sum(box.numel for box in self.boxes)


def _in_file_order(
    folder: Path, work: Mapping[str, list[_Block]], records: Files | None
) -> Iterator[_Block]:
    """Yield the blocks of each file in the order in which they are stored.

    `records`: the expected size and checksum of each file. If given, this function reads all files
    to check them, and yields each block when its bytes have been read. The caller then reads the
    block from the page cache, so the disk is read only once. Raises DataError if a file differs
    from its record."""
    for name in sorted(work):
        blocks = sorted(work[name], key=lambda block: block.offset)
        if records is None:
            yield from blocks
            continue
        # a run that goes on removes old checkpoints
        with os_errors(folder / name, "cannot be read"):
            file = (folder / name).open("rb", buffering=0)
        with file:
            checksum, place, buffer = 0, 0, memoryview(bytearray(_READ_BYTES))
            while count := file.readinto(buffer):
                checksum, place = zlib.crc32(buffer[:count], checksum), place + count
                while blocks and blocks[0].offset + blocks[0].length <= place:
                    block = blocks.pop(0)
                    yield block
                    done_with = max(0, block.offset - _BEHIND_BYTES)
                    os.posix_fadvise(file.fileno(), 0, done_with, os.POSIX_FADV_DONTNEED)
        if FileRecord(place, f"{checksum:08x}") != records[name]:
            raise DataError(f"{folder / name}: altered, its checksum differs from the manifest's")


def by_key(weights: WeightMap) -> dict[str, TensorRecipe]:
    """Return the recipes by the keys of a checkpoint. A checkpoint stores the experts of a layer as
    one tensor."""
    keys = dict.fromkeys(re.sub(r"\[\d+\]$", "", name) for name in weights.recipes)
    return {key: weights[key] for key in keys}


def checked_tensors(
    folder: Path, index: Metadata, recipes: Mapping[str, TensorRecipe]
) -> dict[str, TensorStorageMetadata]:
    """Return the tensors of a checkpoint. Raises DataError if these are not the tensors of the
    model."""
    stored = tensors_of(index)
    missing: list[str] = []
    problems: list[str] = []
    for key, recipe in recipes.items():
        if key not in stored:
            missing.append(f"{key} is missing")
            continue
        shape, dtype = list(stored[key].size), stored[key].properties.dtype
        if shape != list(recipe.shape):
            problems.append(f"{key} has the shape {shape}; model.json says {list(recipe.shape)}")
        elif dtype not in DTYPES.values():
            problems.append(f"{key} has the dtype {dtype}")
    foreign = [
        f"{key} is no tensor of the model in model.json" for key in stored if key not in recipes
    ]
    if lines := [*some_of(missing), *some_of(problems), *some_of(foreign)]:
        raise DataError("\n".join(f"{folder}: {line}" for line in lines))
    return stored


def _wanted(key: str, dtype: torch.dtype | None) -> torch.dtype | None:
    """Return the dtype to convert to, or None to keep the stored dtype."""
    return None if is_never_rounded(key) else dtype
