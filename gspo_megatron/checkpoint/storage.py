"""Pieces of global tensors, written to and read from a folder in Megatron-Core's torch_dist format.

The format and the planning are torch.distributed.checkpoint's, the wrapped shards Megatron-Core's,
so that stock `megatron.core.dist_checkpointing.load` reads these folders. What is not stock: the
index is never unpickled blindly, nothing of a tensor may be missing or written twice, and writing
needs no helper processes, which Megatron-Core's writer starts and ranks of a local launch may not.
"""

from __future__ import annotations

import io
import json
import math
import os
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies.checkpointable import (
    CheckpointableShardedTensor,
    LocalShardsContainer,
)
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, WriteItem

from gspo_megatron.checkpoint.restricted import read_index
from gspo_megatron.errors import DataError
from gspo_megatron.observe.heartbeat import heartbeat

_FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
_SHOWN = 8  # problems of one kind in a message


@dataclass(frozen=True)
class Piece:
    """A rank's box of the global tensor `key`."""

    key: str
    data: Tensor  # read from or written to in place
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]

    @property
    def end(self) -> tuple[int, ...]:
        return tuple(o + n for o, n in zip(self.offset, self.data.shape, strict=True))


def write_pieces(
    folder: Path,
    pieces: Iterable[Piece],
    group: dist.ProcessGroup | None = None,
    files: Mapping[str, bytes] | None = None,
) -> None:
    """Write the pieces of all ranks of `group` (all of them call it) as whole tensors; `files` are
    small further ones of rank 0. When it returns, all bytes of all ranks are on the disk.

    Raises DataError where a rank cannot write, on all ranks alike; AssertionError where the pieces
    of a tensor do not make up all of it, each element once.
    """
    extra = {"metadata.json": json.dumps(_FORMAT).encode(), "common.pt": _empty_common()}
    writer = _Writer(folder, extra | dict(files or {}))
    try:
        dcp.save(
            _state_dict(pieces), storage_writer=writer, planner=_SavePlanner(), process_group=group
        )
    except CheckpointException as error:
        raise _cause(folder, error) from error


def read_pieces(folder: Path, pieces: Sequence[Piece], *, all_keys: bool = True) -> Metadata:
    """Fill every rank's pieces from the folder; all ranks call it. With `all_keys`, the folder may
    hold no tensor that no rank asks for.

    Raises DataError, the same on all ranks, where a file is missing, damaged or foreign, and where
    a tensor is missing, has another shape, or is not asked for.
    """
    error: str | None = None
    try:
        index = read_index(folder)
        error = "\n".join(_mismatches(folder, index, pieces)) or None
    except DataError as found:
        error = str(found)
    raise_everywhere(error)
    if all_keys:
        raise_everywhere(_unread(folder, index, pieces))
    try:
        with warnings.catch_warnings():
            # every rank plans for itself, and is told so each time
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(
                _state_dict(pieces),
                storage_reader=_Reader(folder, index),
                planner=_LoadPlanner(folder),
                no_dist=True,
            )
    except (CheckpointException, Exception) as found:  # noqa: BLE001 (damaged files raise anything)
        cause = _root(found)
        known = isinstance(cause, DataError)
        error = str(cause) if known else f"{folder}: cannot be read: {_first_line(cause)}"
    raise_everywhere(error)
    return index


def raise_everywhere(error: str | None) -> None:
    """Raise DataError on all ranks where `error` is set on any of them; a collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        found: list[str | None] = [error]
    else:
        found = [None] * dist.get_world_size()
        dist.all_gather_object(found, error)
    lines = list(dict.fromkeys(line for text in found if text for line in text.splitlines()))
    if not lines:
        return
    more = len(lines) - 2 * _SHOWN
    if more > 0:
        lines[2 * _SHOWN :] = [f"... and {more} more"]
    raise DataError("\n".join(lines))


def write_file(path: Path, content: bytes) -> None:
    """Write and fsync."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


class _Writer(dcp.FileSystemWriter):
    """The index does not tell where it was first written, and small files join it."""

    def __init__(self, folder: Path, files: Mapping[str, bytes]) -> None:
        super().__init__(folder)
        self._folder, self._files = folder, files

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()

    def write_data(self, plan: SavePlan, planner: dcp.SavePlanner) -> Any:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:  # torch's file writer, closing what it could not write
            raise _operating_system_error(error) or error from None

    def finish(self, metadata: Metadata, results: Any) -> None:
        for name, content in self._files.items():
            write_file(self._folder / name, content)
        super().finish(metadata, results)


class _Reader(dcp.FileSystemReader):
    """Reads with an index that has been checked."""

    def __init__(self, folder: Path, index: Metadata) -> None:
        super().__init__(folder)
        self._folder, self._index = folder, index

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        return self._index

    def read_data(self, plan: LoadPlan, planner: dcp.LoadPlanner) -> Any:
        """File by file, so that one that is damaged is named; torch's own words would advise to
        read it without precautions."""
        items: dict[str, list] = {}
        for item in plan.items:
            items.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        done = super().read_data(replace(plan, items=[]), planner)
        for name, listed in items.items():
            try:
                super().read_data(replace(plan, items=listed), planner)
            except Exception as error:  # noqa: BLE001 (damaged bytes raise anything)
                cause = getattr(error, "strerror", None) or type(error).__name__
                raise DataError(f"{self._folder / name}: damaged: {cause}") from None
        return done


class _SavePlanner(dcp.DefaultSavePlanner):
    """Every element of every tensor is written exactly once."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        counts = Counter(item.index for plan in all_plans for item in plan.items)
        twice = [index for index, count in counts.items() if count > 1]
        assert not twice, f"written by more than one rank: {twice[:_SHOWN]}"
        plans, index = super().create_global_plan(all_plans)  # refuses overlaps
        for key, entry in index.state_dict_metadata.items():
            stored = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
            assert stored == math.prod(entry.size), f"no rank writes all of {key}"
        return plans, index

    def resolve_data(self, write_item: WriteItem) -> Any:
        heartbeat()  # called for each tensor before it is written
        return super().resolve_data(write_item)


class _LoadPlanner(dcp.DefaultLoadPlanner):
    """Every element of every piece is read exactly once; the default leaves gaps as they are."""

    def __init__(self, folder: Path) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._folder = folder

    def create_local_plan(self) -> LoadPlan:
        plan = super().create_local_plan()
        missing: Counter[tuple] = Counter()
        for key, value in self.state_dict.items():
            for chunk in value.__create_chunk_list__():
                missing[key, chunk.offsets] = math.prod(chunk.sizes)
        for item in plan.items:
            missing[item.dest_index.fqn, item.dest_index.offset] -= math.prod(item.lengths)
        wrong = [key for (key, _), count in missing.items() if count]
        if wrong:
            raise DataError(f"{self._folder}: pieces of {wrong[:_SHOWN]} overlap or leave gaps")
        return plan

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        heartbeat()


def _state_dict(pieces: Iterable[Piece]) -> dict[str, Tensor]:
    """The pieces by key, in the wrapper that Megatron-Core hands to torch.distributed.checkpoint.
    They lie anywhere in the global tensor, not on a grid."""
    shards: dict[str, list[CheckpointableShardedTensor]] = {}
    seen = set()
    for piece in pieces:
        assert (piece.key, piece.offset) not in seen, f"two pieces at one place: {piece}"
        seen.add((piece.key, piece.offset))
        shard = ShardedTensor(
            key=piece.key,
            data=piece.data.detach(),
            dtype=piece.data.dtype,
            local_shape=tuple(piece.data.shape),
            global_shape=piece.global_shape,
            global_offset=piece.offset,
            axis_fragmentations=None,
        )
        shards.setdefault(piece.key, []).append(CheckpointableShardedTensor.from_sh_ten(shard))
    return {
        key: listed[0] if len(listed) == 1 else LocalShardsContainer(listed)
        for key, listed in shards.items()
    }


def _mismatches(folder: Path, index: Metadata, pieces: Sequence[Piece]) -> list[str]:
    problems = {}
    for piece in pieces:
        entry = index.state_dict_metadata.get(piece.key)
        if not isinstance(entry, TensorStorageMetadata):
            problems[piece.key] = f"{folder}: has no tensor {piece.key}"
        elif tuple(entry.size) != piece.global_shape:
            shape, wanted = list(entry.size), list(piece.global_shape)
            problems[piece.key] = f"{folder}: {piece.key} has shape {shape}, the model {wanted}"
    return list(problems.values())


def _unread(folder: Path, index: Metadata, pieces: Sequence[Piece]) -> str | None:
    """What is stored and belongs to no rank's model; rank 0 tells."""
    mine = {piece.key for piece in pieces}
    everyones: list[set[str] | None] = [mine]
    if dist.is_initialized() and dist.get_world_size() > 1:
        main = dist.get_rank() == 0
        everyones = [None] * dist.get_world_size()
        dist.gather_object(mine, everyones if main else None, dst=0)
        if not main:
            return None
    stored = {
        key
        for key, entry in index.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    extra = sorted(stored.difference(*(keys for keys in everyones if keys is not None)))
    return "\n".join(f"{folder}: {key} belongs to no part of the model" for key in extra) or None


def _empty_common() -> bytes:
    """Megatron-Core 0.16 insists on a file of what is not sharded."""
    buffer = io.BytesIO()
    torch.save({}, buffer)
    return buffer.getvalue()


def _cause(folder: Path, error: CheckpointException) -> BaseException:
    """What went wrong on the first rank that failed, in the words of a user's error where the
    machine refused to write."""
    rank, (cause, _) = min(error.failures.items())
    cause = _root(cause)
    if isinstance(cause, OSError):
        return DataError(f"{folder}: rank {rank} cannot write: {cause.strerror or cause}")
    return cause


def _operating_system_error(error: BaseException | None) -> OSError | None:
    while error is not None and not isinstance(error, OSError):
        error = error.__context__
    return error


def _root(error: BaseException) -> BaseException:
    while True:
        if isinstance(error, CheckpointException) and error.failures:
            error = min(error.failures.items())[1][0]
        elif error.__cause__ is not None:
            error = error.__cause__
        else:
            return error


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0]
