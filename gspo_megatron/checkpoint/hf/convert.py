"""Converts files: a Hugging Face folder to a checkpoint, and a checkpoint back.

Needs no GPU, no Megatron-Core and no memory for the model: tensors pass through in blocks, a few at
a time, one in each thread. Checkpoints are read and written by torch.distributed.checkpoint (DCP).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import os
import re
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from gspo_megatron.checkpoint.folder import CHECKPOINTS, positions
from gspo_megatron.checkpoint.hf.files import DTYPES, HfFolder, check_tied_copy, checked_folder
from gspo_megatron.checkpoint.hf.side_files import (
    check_tokenizer,
    export_config,
    generation_files,
    tokenizer_files,
)
from gspo_megatron.checkpoint.hf.weight_map import Recipe, Slices, WeightMap, fill, weight_map
from gspo_megatron.checkpoint.hf.writer import (
    MAX_SHARD_BYTES,
    HfWriter,
    NewFolder,
    TensorSpec,
    copy_file,
    write_errors,
    write_text,
)
from gspo_megatron.checkpoint.manifest import (
    MANIFEST,
    FileRecord,
    damage_notes,
    dump_manifest,
    find_damage,
    record_of,
)
from gspo_megatron.checkpoint.run_state import MODEL_FILE, TOKENIZER, RunState, read_model
from gspo_megatron.checkpoint.safe_pickle import read_index
from gspo_megatron.checkpoint.storage import (
    SavePlanner,
    TorchDistReader,
    TorchDistWriter,
    blocks,
    operating_system_error,
    root_cause,
)
from gspo_megatron.config.families import describe, family_of, family_of_shape
from gspo_megatron.config.shape import ModelShape, shape_of
from gspo_megatron.data.fingerprints import fingerprint
from gspo_megatron.errors import ConfigError, DataError
from gspo_megatron.observe.progress import Progress

_FILE_BYTES = 4 << 30  # of a checkpoint's files: one is synced while others are written
_MOST_THREADS = 4  # each holds a few blocks in memory
_MEGABYTE = 1_000_000

Item = TypeVar("Item")
Result = TypeVar("Result")
Done = Callable[[int], None]  # called with the bytes that were finished


def hf_to_megatron(
    source: Path,
    destination: Path,
    *,
    dtype: torch.dtype | None = None,
    ignore_custom_code: bool = False,
) -> None:
    """Convert a Hugging Face folder to a new checkpoint folder, which any layout loads.

    dtype: of all tensors but the biases of routers (default: each keeps its own).

    Raises DataError with all that is wrong with the source before anything is written, and where
    the destination cannot be written.
    """
    folder, weights, shape, vocab_size = _open_hf(source, ignore_custom_code)
    recipes = _by_key(weights)
    specs = {
        key: TensorSpec(_wanted(key, dtype) or _common_dtype(recipe, folder), recipe.shape)
        for key, recipe in recipes.items()
    }
    model_document = {
        "shape": dataclasses.asdict(shape),
        "vocab_size": vocab_size,
        "tokenizer": None,  # in hf/, where there is one
        "hf": folder.config,
    }
    with NewFolder(destination, _bytes(specs)) as new, write_errors(destination):
        write_text(new.partial / MODEL_FILE, json.dumps(model_document, indent=1) + "\n")
        (new.partial / "hf").mkdir()
        for file in folder.side_files:
            copy_file(file, new.partial / "hf")
        writer = _BlockWriter(new.partial / "model", _bytes(specs))
        try:
            with _quietly():
                planner = _ImportPlanner(folder, recipes, specs)
                dcp.save({}, storage_writer=writer, planner=planner, no_dist=True)
        except CheckpointException as error:
            raise root_cause(error) from error
        files = {f"model/{name}": record for name, record in writer.records.items()}
        for path in sorted(path for path in new.partial.rglob("*") if path.is_file()):
            name = path.relative_to(new.partial).as_posix()
            files[name] = files.get(name) or record_of(path)
        write_text(new.partial / MANIFEST, dump_manifest(files).decode())
        new.publish()


class _ImportPlanner(SavePlanner):
    """Plans the blocks of all tensors; each is read from the source when it is written."""

    def __init__(
        self, folder: HfFolder, recipes: Mapping[str, Recipe], specs: Mapping[str, TensorSpec]
    ) -> None:
        super().__init__()
        self._folder, self._recipes, self._specs = folder, recipes, specs

    def create_local_plan(self) -> SavePlan:
        items = []
        for key, (dtype, shape) in self._specs.items():
            for number, block in enumerate(blocks(shape, dtype)):
                offset = torch.Size(part.start for part in block)
                size = torch.Size(part.stop - part.start for part in block)
                data = TensorWriteData(
                    chunk=ChunkStorageMetadata(offsets=offset, sizes=size),
                    properties=TensorProperties(dtype=dtype),
                    size=torch.Size(shape),
                )
                index = MetadataIndex(key, offset, number)
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        key, chunk = write_item.index.fqn, write_item.tensor_data.chunk
        out = torch.empty(chunk.sizes, dtype=self._specs[key].dtype)
        fill(out, self._recipes[key], _slices(chunk), self._folder.read)
        return out


class _BlockWriter(TorchDistWriter):
    """Writes several files at a time. DCP's own writer keeps the last block of every tensor in
    memory until a file is complete. `records` has size and checksum of the files."""

    def __init__(self, folder: Path, total: int) -> None:
        super().__init__(folder)
        self.records: dict[str, FileRecord] = {}
        self._total = total

    def write_data(self, plan: SavePlan, planner: dcp.SavePlanner) -> Future[list[WriteResult]]:
        count = max(_thread_count(), -(-self._total // _FILE_BYTES))
        files: list[list[WriteItem]] = [[] for _ in range(count)]
        written = 0
        for item in plan.items:
            files[written * count // max(1, self._total)].append(item)
            written += _item_bytes(item)

        def write(number: int, done: Done) -> list[WriteResult]:
            return self._write_file(f"__0_{number}.distcp", files[number], planner, done)

        numbers = [number for number in range(count) if files[number]]
        results = _in_threads(write, numbers, "hf-to-megatron, MB", self._total)
        future: Future[list[WriteResult]] = Future()
        future.set_result([result for listed in results for result in listed])
        return future

    def _write_file(
        self, name: str, items: Sequence[WriteItem], planner: dcp.SavePlanner, done: Done
    ) -> list[WriteResult]:
        results = []
        try:
            with (self._folder / name).open("xb") as stream:
                for item in items:
                    start = stream.tell()
                    torch.save(planner.resolve_data(item), stream)
                    length = stream.tell() - start
                    info = _StorageInfo(name, start, length)
                    results.append(WriteResult(item.index, length, info))
                    done(_item_bytes(item))
                stream.flush()
                os.fsync(stream.fileno())
        except RuntimeError as error:
            raise operating_system_error(error) or error from None
        self.records[name] = record_of(self._folder / name)
        return results


@dataclass(frozen=True)
class Share:
    """This process of several that convert together. gather(value) is a collective: it returns the
    values of all processes."""

    rank: int = 0
    world_size: int = 1
    gather: Callable[[Any], list[Any]] = lambda value: [value]

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def together(self, work: Callable[[], Result]) -> list[Result]:
        """What `work` returns in each process. Where it raises DataError or OSError in one of them,
        all raise."""
        result, problem = None, None
        try:
            result = work()
        except (DataError, OSError) as error:
            problem = error
        gathered = self.gather((result, None if problem is None else str(problem)))
        if problem is not None:
            raise problem
        messages = [message for _, message in gathered if message is not None]
        if messages:
            raise DataError("\n".join(messages))
        return [found for found, _ in gathered]


@contextmanager
def shared_by_ranks() -> Iterator[Share]:
    """The share of a rank that torchrun's variables describe (RANK, WORLD_SIZE, MASTER_ADDR,
    MASTER_PORT)."""
    import torch.distributed as dist

    world_size = int(os.environ["WORLD_SIZE"])
    if world_size == 1:
        yield Share()
        return

    def gather(value: Any) -> list[Any]:
        values = [None] * world_size
        dist.all_gather_object(values, value)
        return values

    dist.init_process_group("gloo")
    try:
        yield Share(dist.get_rank(), world_size, gather)
    finally:
        dist.destroy_process_group()


def megatron_to_hf(
    source: Path,
    destination: Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    share: Share = Share(),
) -> tuple[Path, list[str]]:
    """Convert a checkpoint, of any layout, to a new Hugging Face folder.

    source: a checkpoint folder, or a run's (see `open_checkpoint`); dtype: of all tensors but the
    biases of routers (default: each keeps its own). Every process of `share` calls it and writes
    files of its own. Returns the checkpoint, and notes for the user.

    Raises DataError with all that is wrong with the source, before anything is written; ConfigError
    for a model that no family has, and DataError where the destination cannot be written.
    """
    checkpoint = open_checkpoint(source, share)
    model = checkpoint.folder / "model"
    index = read_index(model)
    shape, vocab_size = checkpoint.shape, checkpoint.vocab_size
    original = checkpoint.hf_config
    family = family_of_shape(shape) if original is None else family_of(original)
    weights = weight_map(family, shape, vocab_size)
    recipes = _by_key(weights)
    stored = _checked_tensors(model, index, recipes)
    keys = {box.name: key for key, recipe in recipes.items() for box in recipe.boxes}
    specs = {
        name: TensorSpec(_wanted(keys[name], dtype) or stored[keys[name]].properties.dtype, size)
        for name, size in weights.shapes.items()
    }
    main_dtype = specs[family.names["embedding"]].dtype
    config = export_config(shape, vocab_size, main_dtype, original)
    copies, notes = _tokenizer_of(checkpoint)
    check_tokenizer(copies, vocab_size)
    if share.world_size > 1:
        max_shard_bytes = min(max_shard_bytes, -(-_bytes(specs) // share.world_size))
    writer = HfWriter(destination, specs, max_shard_bytes=max_shard_bytes, owner=share.is_main)
    with writer:
        share.gather(None)  # now the folder is there
        files = writer.files[share.rank :: share.world_size]
        export = _Export(model, index, recipes, {name for file in files for name in file.offsets})

        def convert() -> None:
            export.run(writer, share.is_main)
            writer.finish(files)

        share.together(convert)
        if share.is_main:
            # an imported folder has its own generation_config.json, or none
            made = generation_files(copies) if checkpoint.imported is None else {}
            writer.publish({"config.json": config, **made}, copies)
        share.gather(None)
    return checkpoint.folder, [*checkpoint.notes, *notes]


class _Export(dcp.DefaultLoadPlanner):
    """Reads each stored block that the tensors of `names` need, once and in any order, and writes
    its parts to their places."""

    def __init__(
        self, folder: Path, index: Metadata, recipes: Mapping[str, Recipe], names: set[str]
    ) -> None:
        super().__init__()
        self._folder, self._index = folder, index
        self._recipes = {
            key: Recipe(recipe.shape, tuple(box for box in recipe.boxes if box.name in names))
            for key, recipe in recipes.items()
        }

    def run(self, writer: HfWriter, progress: bool) -> None:
        self._writer = writer
        items = [
            ReadItem(
                type=LoadItemType.TENSOR,
                dest_index=MetadataIndex(key, chunk.offsets, number),
                dest_offsets=torch.Size([0] * len(chunk.sizes)),
                storage_index=MetadataIndex(key, chunk.offsets, number),
                storage_offsets=torch.Size([0] * len(chunk.sizes)),
                lengths=chunk.sizes,
            )
            for key, recipe in self._recipes.items()
            for number, chunk in enumerate(self._index.state_dict_metadata[key].chunks)
            if math.prod(chunk.sizes) and next(recipe.cut(_slices(chunk)), None) is not None
        ]

        def convert(item: ReadItem, done: Done) -> None:
            TorchDistReader(self._folder, self._index).read_data(LoadPlan([item]), self)
            done(self._size(item))

        total = sum(map(self._size, items))
        _in_threads(convert, items, "megatron-to-hf, MB", total, enabled=progress)

    def _size(self, item: ReadItem) -> int:
        return math.prod(item.lengths) * self._dtype(item).itemsize

    def _dtype(self, item: ReadItem) -> torch.dtype:
        return self._index.state_dict_metadata[item.storage_index.fqn].properties.dtype

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        return torch.empty(read_item.lengths, dtype=self._dtype(read_item))

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        place = read_item.storage_index
        slices = [slice(at, at + n) for at, n in zip(place.offset, read_item.lengths)]
        for box in self._recipes[place.fqn].cut(slices):
            part = tensor[box.target_slices].to(self._writer.tensors[box.name].dtype)
            sizes = box.size[len(box.size) - len(box.source) :]
            self._writer.write(box.name, part.reshape(sizes), box.source_slices)


@dataclass(frozen=True)
class Source:
    """A checkpoint without damage. `hf_config`: the config.json that its weights were imported
    with; `tokenizer`: the path that the run's configuration named, and `fingerprint` that of its
    contents then, where it is known; `notes`: about damaged newer checkpoints."""

    folder: Path
    notes: tuple[str, ...]
    shape: ModelShape
    vocab_size: int
    tokenizer: str | None
    fingerprint: str | None
    hf_config: Mapping[str, Any] | None

    @property
    def imported(self) -> Path | None:
        """Settings and tokenizer of the folder that it was converted from; None for a run's."""
        folder = self.folder / "hf"
        return folder if folder.is_dir() else None


def open_checkpoint(path: Path, share: Share = Share()) -> Source:
    """`path` is a checkpoint, or a folder of them, or a run: then the newest one whose files all
    have their sizes is taken.

    The main process chooses, because a run may publish another one at any time; all processes read
    the files and compare their checksums. Raises DataError with all that is wrong.
    """
    folder, notes = share.together(lambda: _find(path) if share.is_main else None)[0]
    threads = _thread_count()
    shares = [(share.rank * threads + n, share.world_size * threads) for n in range(threads)]

    def damage_of(part: tuple[int, int]) -> list[str]:
        return find_damage(folder, share=part, only=_matters)

    def damage() -> list[str]:
        with ThreadPoolExecutor(threads) as pool:
            return list(itertools.chain(*pool.map(damage_of, shares)))

    lines = [f"{folder}: {line}" for found in share.together(damage) for line in found]
    if lines:
        if folder != path:
            lines.append(f"{path}: to convert another checkpoint of it, give that one's path")
        raise DataError("\n".join([*notes, *lines]))
    document = read_model(folder)
    try:
        known = {field.name for field in dataclasses.fields(ModelShape)}
        sizes = {name: value for name, value in document["shape"].items() if name in known}
        return Source(
            folder,
            tuple(notes),
            ModelShape(**sizes),
            int(document["vocab_size"]),
            document.get("tokenizer"),
            _fingerprint(folder),
            document.get("hf"),
        )
    except (AttributeError, TypeError, ValueError) as error:
        raise DataError(f"{folder / MODEL_FILE}: does not describe a model: {error}") from error


def _matters(name: str) -> bool:
    """Whether a file is needed: the optimizer's are not."""
    return name.startswith(("model/", "hf/")) or name == MODEL_FILE


def _find(path: Path) -> tuple[Path, list[str]]:
    """The checkpoint that a path means, and notes about damaged newer ones."""
    if (path / MANIFEST).exists():
        return path, []
    if not path.is_dir():
        raise DataError(f"{path}: no such folder")
    checkpoints = path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path
    problems, notes = [], []
    for position in positions(checkpoints):
        folder = checkpoints / position.name
        damage = find_damage(folder, contents=False, only=_matters)
        if not damage:
            return folder, notes
        notes += damage_notes(position.name, damage)
        problems += [f"{folder}: {line}" for line in damage]
    raise DataError(
        "\n".join([*problems, f"{path}: not a checkpoint of ours, and there is no whole one in it"])
    )


def _fingerprint(folder: Path) -> str | None:
    """Of the run's tokenizer; None where no run wrote the checkpoint, or its run.json is damaged:
    the weights do not need it."""
    try:
        return RunState.read(folder).fingerprints.get(TOKENIZER)
    except DataError:
        return None


def _tokenizer_of(checkpoint: Source) -> tuple[list[Path], list[str]]:
    """The tokenizer's files, and notes for the user: from the folder that the checkpoint was
    imported from, else the tokenizer that the run named."""
    if checkpoint.imported is not None or checkpoint.tokenizer is None:
        return tokenizer_files(checkpoint.imported), []
    path = Path(checkpoint.tokenizer)
    if not path.exists():
        return [], [f"{path}: the run's tokenizer is not there (any more), and is left out"]
    if checkpoint.fingerprint not in (None, fingerprint(path)):
        lacks = "no longer has the contents that the run's tokenizer had, and is left out"
        return [], [f"{path}: {lacks}"]
    return tokenizer_files(path), []


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
    check_tied_copy(folder, weights)
    return folder, weights, shape, preset.vocab_size


def _by_key(weights: WeightMap) -> dict[str, Recipe]:
    """The recipes by the keys of a checkpoint, where the experts of a layer are one tensor."""
    keys = dict.fromkeys(re.sub(r"\[\d+\]$", "", name) for name in weights.recipes)
    return {key: weights[key] for key in keys}


def _checked_tensors(
    folder: Path, index: Metadata, recipes: Mapping[str, Recipe]
) -> dict[str, TensorStorageMetadata]:
    """The tensors of a checkpoint. Raises DataError where they are not those of the model."""
    stored = {
        key: entry
        for key, entry in index.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    problems = []
    for key, recipe in recipes.items():
        if key not in stored:
            problems.append(f"{folder}: {key} is missing")
        elif tuple(stored[key].size) != recipe.shape:
            problems.append(
                f"{folder}: {key} has the shape {list(stored[key].size)}; model.json says "
                f"{list(recipe.shape)}"
            )
        elif stored[key].properties.dtype not in DTYPES.values():
            problems.append(f"{folder}: {key} has the dtype {stored[key].properties.dtype}")
    problems += [
        f"{folder}: {key} belongs to nothing in the model that model.json describes"
        for key in stored
        if key not in recipes
    ]
    if problems:
        raise DataError("\n".join(problems))
    return stored


def _wanted(key: str, dtype: torch.dtype | None) -> torch.dtype | None:
    """The biases of routers keep their dtype: Megatron-Core accumulates them in fp32."""
    return None if key.endswith(".expert_bias") else dtype


def _common_dtype(recipe: Recipe, folder: HfFolder) -> torch.dtype:
    """One that holds the values of all tensors that become one."""
    dtypes = {DTYPES[folder.tensors[box.name].dtype] for box in recipe.boxes}
    return functools.reduce(torch.promote_types, dtypes)


def _slices(chunk: ChunkStorageMetadata) -> Slices:
    return tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes))


def _bytes(specs: Mapping[str, TensorSpec]) -> int:
    return sum(spec.bytes for spec in specs.values())


def _item_bytes(item: WriteItem) -> int:
    data = item.tensor_data
    return math.prod(data.chunk.sizes) * data.properties.dtype.itemsize


def _thread_count() -> int:
    return max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0))))


def _in_threads(
    work: Callable[[Item, Done], Result],
    items: Sequence[Item],
    title: str,
    total: int,
    *,
    enabled: bool = True,
) -> list[Result]:
    """work(item, done) for all items, a few at a time; `done` moves a progress bar over `total`
    bytes. After the first error, or Ctrl-C, `done` raises in all threads."""
    lock, stopped = threading.Lock(), threading.Event()
    count, size = 0, max(1, total // _MEGABYTE)

    def done(more: int) -> None:
        nonlocal count
        if stopped.is_set():
            raise InterruptedError
        with lock:
            count += more
            bar.update(size if count >= total else min(size - 1, count // _MEGABYTE), {})

    torch.set_num_threads(1)  # these threads share the work
    with Progress(size, title, enabled=enabled) as bar, ThreadPoolExecutor(_thread_count()) as pool:
        futures = [pool.submit(work, item, done) for item in items]
        try:
            for future in as_completed(futures):
                future.result()
        except BaseException:
            stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [future.result() for future in futures]


@contextmanager
def _quietly() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
