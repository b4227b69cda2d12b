"""Writes and reads pieces of global tensors in a folder of Megatron-Core's torch_dist format.

torch.distributed.checkpoint (DCP) provides the format and the planning, and stock
`megatron.core.dist_checkpointing.load` reads these folders. This module differs from Megatron-Core
in two points: no part of a tensor may be missing or written twice, and no helper processes are
started.

DCP's index, `.metadata`, is a pickle, and reading a pickle can run any code. Here the pickle may
name only the plain records of an index. The index is then checked against the files.
"""

from __future__ import annotations

import enum
import io
import itertools
import json
import math
import pickle
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from gspo_megatron.checkpoint.folder import write_file
from gspo_megatron.errors import DataError, some_of
from gspo_megatron.files import make_folder
from gspo_megatron.process.heartbeat import heartbeat

_FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
_SHOWN = 8  # a message lists at most this number of problems of one kind
# The largest block of a stored tensor. A reader holds one block in memory at a time.
BLOCK_BYTES = 64 << 20
INDEX = ".metadata"
# The names that the index's pickle may load, by module. The pickle may also load dtypes of torch.
_RECORDS = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    # When Megatron-Core itself saves, it adds its plans to the index.
    "torch.distributed.checkpoint.planner": {
        "BytesIOWriteData",
        "SavePlan",
        "TensorWriteData",
        "WriteItem",
        "WriteItemType",
    },
    "pathlib": {"PosixPath", "PurePosixPath"},
    "pathlib._local": {"PosixPath", "PurePosixPath"},
}


@dataclass(frozen=True)
class Piece:
    """A box (rectangular part) of the global tensor `key` on one rank."""

    key: str
    data: Tensor  # a read fills this tensor in place; a write stores it
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]

    @classmethod
    def of_whole(cls, key: str, tensor: Tensor) -> Piece:
        """Make the piece that is the whole global tensor."""
        return cls(key, tensor, tuple(tensor.shape), (0,) * tensor.dim())

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(o, o + n) for o, n in zip(self.offset, self.data.shape, strict=True))

    @property
    def chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size(self.offset), self.data.shape)

    def in_blocks(self, most_bytes: int) -> Iterator[Piece]:
        """Cut this piece into pieces of at most `most_bytes`, which are whole rows where
        possible."""
        shape = self.data.shape
        size, cut = self.data.itemsize, len(shape)  # the dimensions from `cut` on stay whole
        while cut and size * shape[cut - 1] <= most_bytes:
            cut -= 1
            size *= shape[cut]
        steps = [1] * cut + list(shape[cut:])
        if cut:
            steps[cut - 1] = max(1, most_bytes // size)
        starts = (range(0, max(1, n), max(1, step)) for n, step in zip(shape, steps))
        for start in itertools.product(*starts):
            block = tuple(slice(a, min(a + step, n)) for a, step, n in zip(start, steps, shape))
            offset = tuple(a + b for a, b in zip(self.offset, start, strict=True))
            yield replace(self, data=self.data[block], offset=offset)


def write_pieces(
    folder: Path,
    pieces: Iterable[Piece],
    group: dist.ProcessGroup | None = None,
    files: Mapping[str, bytes] | None = None,
) -> None:
    """Write the pieces of all ranks of `group` as whole tensors. All these ranks call it. `files`
    are small further files, which rank 0 writes. When the call returns, all bytes of all ranks are
    on the disk.

    Raises DataError on all ranks if one of them cannot write. Raises AssertionError if the pieces
    of a tensor do not hold each of its elements exactly once.
    """
    writer, planner = TorchDistWriter(folder, files), SavePlanner(pieces, BLOCK_BYTES)
    try:
        dcp.save({}, storage_writer=writer, planner=planner, process_group=group)
    except CheckpointException as error:
        rank = min(error.failures)
        cause = error.failures[rank][0]
        if isinstance(cause, OSError):
            why = cause.strerror or cause
            raise DataError(f"{folder}: rank {rank} cannot write: {why}") from error
        raise cause from error


def read_pieces(folder: Path, pieces: Sequence[Piece], unread: Collection[str] = ()) -> None:
    """Fill every rank's pieces from the folder. All ranks call it. Raises DataError on all ranks if
    a file is missing, damaged or foreign, if a tensor is missing or has a wrong shape, or if the
    folder holds a tensor that no rank reads and that is not in `unread`.
    """
    # This import is not at the top, because it loads Megatron-Core, which the offline converter
    # does not need.
    from gspo_megatron.platform.collectives import gather_objects, raised_everywhere

    shapes = {piece.key: piece.global_shape for piece in pieces}
    with raised_everywhere():
        index = read_index(folder)
        stored = {key: tuple(entry.size) for key, entry in tensors_of(index).items()}
        problems = [
            f"{folder}: {key} has shape {list(stored[key])}; the model has {list(shape)}"
            if key in stored
            else f"{folder}: has no tensor {key}"
            for key, shape in shapes.items()
            if stored.get(key) != shape
        ]
        if problems:
            raise DataError("\n".join(some_of(problems)))
    keys_of_ranks = gather_objects(set(shapes))
    with raised_everywhere():
        if keys_of_ranks and (extra := sorted(stored.keys() - set().union(unread, *keys_of_ranks))):
            lines = [f"{folder}: {key} belongs to no part of the model" for key in extra]
            raise DataError("\n".join(some_of(lines)))
    with raised_everywhere():
        TorchDistReader(folder, index).read(pieces)


class TorchDistWriter(dcp.FileSystemWriter):
    """DCP's writer, which also writes small files and leaves the folder's path out of the index."""

    def __init__(self, folder: Path, files: Mapping[str, bytes] | None = None) -> None:
        super().__init__(folder)
        common = io.BytesIO()  # holds nothing, but Megatron-Core 0.16 needs this file
        torch.save({}, common)
        standard = {"metadata.json": json.dumps(_FORMAT).encode(), "common.pt": common.getvalue()}
        self._folder, self._files = folder, standard | dict(files or {})

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        make_folder(self._folder)  # torch's mkdir fails on a shared file system that lags
        return super().prepare_local_plan(plan)

    def write_data(self, plan: SavePlan, planner: dcp.SavePlanner) -> Any:
        with operating_system_errors():
            return super().write_data(plan, planner)

    def finish(self, metadata: Metadata, results: Any) -> None:
        for name, content in self._files.items():
            write_file(self._folder / name, content)
        super().finish(metadata, results)


@contextmanager
def operating_system_errors() -> Generator[None]:
    """Raise the OSError that torch's file writer hides in a RuntimeError when it closes a file."""
    try:
        yield
    except RuntimeError as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__context__
        raise cause or error from None


class TorchDistReader(dcp.FileSystemReader):
    """Reads pieces with an index that `read_index` checked. Several threads may read at once."""

    def __init__(self, folder: Path, index: Metadata) -> None:
        super().__init__(folder)
        self._folder, self._tensors = folder, tensors_of(index)
        self.storage_data = index.storage_data

    def read(self, pieces: Iterable[Piece]) -> None:
        """Fill the pieces. Raises DataError if the index does not cover a piece exactly, which DCP
        ignores, or if a file is damaged. The error names the file, but leaves out torch's message,
        because that message advises unsafe unpickling."""
        places = _by_place(pieces)
        chunks: dict[str, list[ChunkStorageMetadata]] = defaultdict(list)
        for piece in places.values():
            chunks[piece.key].append(piece.chunk)
        missing = {place: piece.data.numel() for place, piece in places.items()}
        items: dict[str, list[ReadItem]] = defaultdict(list)  # file -> reads
        for key, listed in chunks.items():
            for item in create_read_items_for_chunk_list(key, self._tensors[key], listed):
                missing[item.dest_index] -= math.prod(item.lengths)
                items[self.storage_data[item.storage_index].relative_path].append(item)
        if wrong := [place.fqn for place, count in missing.items() if count]:
            raise DataError(f"{self._folder}: pieces of {wrong[:_SHOWN]} overlap or leave gaps")
        for name, needed in items.items():
            try:
                self.read_data(LoadPlan(needed), _LoadPlanner(places))
            except Exception as error:  # noqa: BLE001 (damaged bytes raise anything)
                cause = getattr(error, "strerror", None) or type(error).__name__
                raise DataError(f"{self._folder / name}: damaged: {cause}") from None


class SavePlanner(dcp.DefaultSavePlanner):
    """Plans to write every element of every tensor exactly once, in blocks of at most `most_bytes`.
    `read` returns the values of a block when the block is written."""

    def __init__(
        self,
        pieces: Iterable[Piece],
        most_bytes: int,
        read: Callable[[Piece], Tensor] = lambda block: block.data,
    ) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._blocks = _by_place(b for piece in pieces for b in piece.in_blocks(most_bytes))
        self._read = read

    def create_local_plan(self) -> SavePlan:
        items = []
        for place, block in self._blocks.items():
            properties = TensorProperties(dtype=block.data.dtype)
            data = TensorWriteData(block.chunk, properties, torch.Size(block.global_shape))
            items.append(WriteItem(place, WriteItemType.SHARD, tensor_data=data))
        return SavePlan(items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        counts = Counter(item.index for plan in all_plans for item in plan.items)
        twice = [index for index, count in counts.items() if count > 1]
        assert not twice, f"written by more than one rank: {twice[:_SHOWN]}"
        plans, index = super().create_global_plan(all_plans)  # refuses overlaps
        for key, entry in tensors_of(index).items():
            stored = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
            assert stored == math.prod(entry.size), f"no rank writes all of {key}"
        return plans, index

    def bytes_of(self, item: WriteItem) -> int:
        return self._blocks[item.index].data.nbytes

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        heartbeat()  # called for each block before it is written
        return self._read(self._blocks[write_item.index])


class _LoadPlanner(dcp.DefaultLoadPlanner):
    """Gives DCP the tensors into which DCP reads: parts of the pieces."""

    def __init__(self, places: Mapping[MetadataIndex, Piece]) -> None:
        super().__init__()
        self._places = places

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        corner = zip(read_item.dest_offsets, read_item.lengths)
        return self._places[read_item.dest_index].data[tuple(slice(a, a + n) for a, n in corner)]

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        heartbeat()


def _by_place(pieces: Iterable[Piece]) -> dict[MetadataIndex, Piece]:
    places: dict[MetadataIndex, Piece] = {}
    for piece in pieces:
        place = MetadataIndex(piece.key, piece.offset)
        assert place not in places, f"two pieces at one place: {piece}"
        places[place] = piece
    return places


def tensors_of(index: Metadata) -> dict[str, TensorStorageMetadata]:
    entries = index.state_dict_metadata.items()
    return {key: entry for key, entry in entries if isinstance(entry, TensorStorageMetadata)}


class _Properties(TensorProperties):
    """TensorProperties without the fields that newer versions of torch have appended."""

    def __setstate__(self, state: tuple) -> None:
        try:
            super().__setstate__(state)
        except ValueError:
            super().__setstate__(state[:5])


def _member(cls: Any, name: Any) -> enum.Enum:
    """Return an enum's member. Replaces `getattr`, with which some Pythons (Debian 12's 3.11.2)
    pickle members of enums."""
    if not (isinstance(cls, enum.EnumMeta) and name in cls.__members__):
        raise pickle.UnpicklingError("it reads an attribute by getattr, which no checkpoint needs")
    member: enum.Enum = cls[name]
    return member


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        if name == TensorProperties.__name__:
            return _Properties
        if name in _RECORDS.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(value := getattr(torch, name, None), torch.dtype):
            return value
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")


def read_index(folder: Path) -> Metadata:
    """Read and check the index of a folder in Megatron-Core's torch_dist format.

    Raises DataError with all problems if the index is missing, damaged or foreign, if blocks of a
    tensor are missing, or if a file that the index names is missing or too short.
    """
    path = folder / INDEX
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; is this the folder of a checkpoint?") from None
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None
    try:
        index = _Unpickler(io.BytesIO(data)).load()
        if not isinstance(index, Metadata):
            raise ValueError(f"it is a {type(index).__name__}")
        problems = _problems(index, folder)
    except Exception as error:  # noqa: BLE001 (a damaged pickle raises just about anything)
        raise DataError(f"{path}: not an index of a checkpoint: {error}") from None
    if problems:
        raise DataError("\n".join(some_of(problems)))
    return index


def _problems(index: Metadata, folder: Path) -> list[str]:
    path = folder / INDEX
    ends: dict[str, int] = {}  # file -> the number of bytes that the file must have
    places = set()
    for place, info in index.storage_data.items():
        name = info.relative_path
        transformed = getattr(info, "transform_descriptors", None)
        if not isinstance(name, str) or Path(name).name != name or transformed:
            return [f"{path}: names {name!r}, which is not a file of this folder"]
        ends[name] = max(ends.get(name, 0), info.offset + info.length)
        places.add((place.fqn, getattr(place, "offset", None)))
    problems = []
    for key, entry in tensors_of(index).items():
        stored = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
        offsets = {chunk.offsets for chunk in entry.chunks}
        all_are_stored = all((key, offset) in places for offset in offsets)
        axes = {len(sizes) for chunk in entry.chunks for sizes in (chunk.offsets, chunk.sizes)}
        whole = all_are_stored and stored == math.prod(entry.size) and axes == {len(entry.size)}
        if not whole or len(offsets) != len(entry.chunks):
            count = f"{stored} of {math.prod(entry.size)} elements"
            problems.append(f"{path}: {key} is not whole: {count} are there")
    for name, end in sorted(ends.items()):
        file = folder / name
        size = file.stat().st_size if file.is_file() else None
        if size is None:
            problems.append(f"{file}: no such file")
        elif size < end:
            problems.append(f"{file}: truncated, it has {size} of {end} bytes")
    return problems
