"""Pieces of global tensors, written to and read from a folder in Megatron-Core's torch_dist format.

Format and planning come from torch.distributed.checkpoint (DCP), the wrapped shards from
Megatron-Core: stock `megatron.core.dist_checkpointing.load` reads these folders. Different from
stock: the index is unpickled safely, no part of a tensor may be missing or written twice, and
writing starts no helper processes.
"""

from __future__ import annotations

import io
import itertools
import json
import math
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, WriteItem

from gspo_megatron.checkpoint.folder import write_file
from gspo_megatron.checkpoint.safe_pickle import read_index
from gspo_megatron.errors import DataError
from gspo_megatron.observe.heartbeat import heartbeat

_FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
_SHOWN = 8  # problems of one kind in a message
# Tensors are stored in blocks of at most so many bytes: what a reader holds in memory at once.
BLOCK_BYTES = 64 << 20


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

    def in_blocks(self) -> Iterator[Piece]:
        for block in blocks(tuple(self.data.shape), self.data.dtype, BLOCK_BYTES):
            offset = tuple(o + s.start for o, s in zip(self.offset, block, strict=True))
            yield replace(self, data=self.data[block], offset=offset)


def blocks(
    shape: Sequence[int], dtype: torch.dtype, most_bytes: int
) -> Iterator[tuple[slice, ...]]:
    """A tensor cut into blocks of at most `most_bytes`, of whole rows where that is possible."""
    size, cut = dtype.itemsize, len(shape)  # the dimensions from `cut` on stay whole
    while cut and size * shape[cut - 1] <= most_bytes:
        cut -= 1
        size *= shape[cut]
    steps = [1] * cut + list(shape[cut:])
    if cut:
        steps[cut - 1] = max(1, most_bytes // size)
    starts = (range(0, max(1, n), max(1, step)) for n, step in zip(shape, steps))
    for start in itertools.product(*starts):
        yield tuple(slice(a, min(a + step, n)) for a, step, n in zip(start, steps, shape))


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
    state_dict = _state_dict(block for piece in pieces for block in piece.in_blocks())
    writer = TorchDistWriter(folder, files or {})
    try:
        dcp.save(state_dict, storage_writer=writer, planner=SavePlanner(), process_group=group)
    except CheckpointException as error:
        rank = min(error.failures)
        cause = root_cause(error)
        if isinstance(cause, OSError):
            why = cause.strerror or cause
            raise DataError(f"{folder}: rank {rank} cannot write: {why}") from error
        raise cause from error


def read_pieces(folder: Path, pieces: Sequence[Piece]) -> None:
    """Fill every rank's pieces from the folder; all ranks call it. Raises DataError, on all ranks
    alike, where a file is missing, damaged or foreign, and where a tensor is missing, has another
    shape, or belongs to no rank's pieces.
    """
    error: str | None = None
    try:
        index = read_index(folder)
        error = "\n".join(_mismatches(folder, index, pieces)) or None
    except DataError as found:
        error = str(found)
    raise_everywhere(error)
    raise_everywhere(_unread(folder, index, pieces))
    try:
        with without_warning():
            dcp.load(
                _state_dict(pieces),
                storage_reader=TorchDistReader(folder, index),
                planner=_LoadPlanner(folder),
                no_dist=True,
            )
    except (CheckpointException, Exception) as found:  # noqa: BLE001 (damaged files raise anything)
        error = str(cause := root_cause(found))
        if not isinstance(cause, DataError):
            error = f"{folder}: cannot be read: {error.partition(chr(10))[0]}"
    raise_everywhere(error)


@contextmanager
def without_warning() -> Iterator[None]:
    """Around calls with no_dist=True, where DCP warns that each process works alone."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def raise_everywhere(error: str | None) -> None:
    """Raise DataError on all ranks where `error` is set on any of them; a collective."""
    # Not at the top: it loads Megatron-Core, which the offline converter does without.
    from gspo_megatron.platform.collectives import all_gather_objects

    found = all_gather_objects(error)
    lines = list(dict.fromkeys(line for text in found if text for line in text.splitlines()))
    more = len(lines) - 2 * _SHOWN
    if more > 0:
        lines[2 * _SHOWN :] = [f"... and {more} more"]
    if lines:
        raise DataError("\n".join(lines))


class TorchDistWriter(dcp.FileSystemWriter):
    """Writes small files, too, and an index that does not tell the folder's first path."""

    def __init__(self, folder: Path, files: Mapping[str, bytes] | None = None) -> None:
        super().__init__(folder)
        common = io.BytesIO()  # of what is not sharded; Megatron-Core 0.16 needs the file
        torch.save({}, common)
        standard = {"metadata.json": json.dumps(_FORMAT).encode(), "common.pt": common.getvalue()}
        self._folder, self._files = folder, standard | dict(files or {})

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()

    def write_data(self, plan: SavePlan, planner: dcp.SavePlanner) -> Any:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:  # from torch's file writer, when it closes the file
            raise operating_system_error(error) or error from None

    def finish(self, metadata: Metadata, results: Any) -> None:
        for name, content in self._files.items():
            write_file(self._folder / name, content)
        super().finish(metadata, results)


class TorchDistReader(dcp.FileSystemReader):
    """Reads with an index that was checked."""

    def __init__(self, folder: Path, index: Metadata) -> None:
        super().__init__(folder)
        self._folder, self._index = folder, index
        self.storage_data = index.storage_data

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        return self._index

    def read_data(self, plan: LoadPlan, planner: dcp.LoadPlanner) -> Any:
        """File by file, so that the damaged one can be named. torch's own message is not shown: it
        advises to unpickle without safety."""
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


class SavePlanner(dcp.DefaultSavePlanner):
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
    """Every element of every piece is read exactly once; DCP's default ignores gaps."""

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
    """The pieces by key, in the wrappers that Megatron-Core uses for DCP."""
    # Imported here, because the offline converter uses this module without Megatron-Core.
    from megatron.core.dist_checkpointing.mapping import ShardedTensor
    from megatron.core.dist_checkpointing.strategies.checkpointable import (
        CheckpointableShardedTensor,
        LocalShardsContainer,
    )

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
    problems = []
    for key, wanted in {piece.key: piece.global_shape for piece in pieces}.items():
        entry = index.state_dict_metadata.get(key)
        if not isinstance(entry, TensorStorageMetadata):
            problems.append(f"{folder}: has no tensor {key}")
        elif (shape := tuple(entry.size)) != wanted:
            problems.append(f"{folder}: {key} has shape {list(shape)}, the model {list(wanted)}")
    return problems


def _unread(folder: Path, index: Metadata, pieces: Sequence[Piece]) -> str | None:
    """A message on rank 0 about stored tensors that belong to no rank's model."""
    from gspo_megatron.platform.collectives import gather_objects

    wanted = gather_objects({piece.key for piece in pieces})
    if wanted is None:
        return None
    stored = {
        key
        for key, entry in index.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    extra = sorted(stored.difference(*wanted))
    return "\n".join(f"{folder}: {key} belongs to no part of the model" for key in extra) or None


def operating_system_error(error: BaseException | None) -> OSError | None:
    """The OSError that an error of torch's file writer comes from."""
    while error is not None and not isinstance(error, OSError):
        error = error.__context__
    return error


def root_cause(error: BaseException) -> BaseException:
    """The first error of a chain; of a CheckpointException, that of the first rank that failed."""
    while True:
        if isinstance(error, CheckpointException) and error.failures:
            error = error.failures[min(error.failures)][0]
        elif error.__cause__ is not None:
            error = error.__cause__
        else:
            return error
