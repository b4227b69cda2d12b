"""Writes Megatron-Core's torch_dist format, making each block just before it is written.

torch's own writer keeps a block of every tensor in memory until its file is done.
"""

from __future__ import annotations

import importlib
import json
import math
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from gspo_megatron.checkpoint.hf.files_header import TensorSpec
from gspo_megatron.checkpoint.hf.offline_blocks import blocks, workspace
from gspo_megatron.checkpoint.hf.offline_share import in_threads, thread_count
from gspo_megatron.checkpoint.hf.pieces import Slices
from gspo_megatron.checkpoint.manifest import FileRecord

_INDEX_MODULE = "gspo_megatron.checkpoint.hf.offline_index"
# What Megatron-Core's dist_checkpointing writes beside the tensors, for a checkpoint of tensors.
_MEGATRON_FILES: dict[str, Any] = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


@dataclass(frozen=True)
class Placed:
    """A block of a tensor, and where its archive is."""

    key: str
    block: Slices
    file: str
    start: int
    length: int


def write_torch_dist(
    folder: Path,
    tensors: Mapping[str, TensorSpec],
    make: Callable[[str, Slices, Tensor], None],
    *,
    done: Callable[[int], None],
) -> dict[str, FileRecord]:
    """Write a folder of tensors, calling make(key, slices, out) for each block just before it is
    written, from several threads, and done(bytes) after it.

    Returns size and checksum of each file; they need not be on the disk yet. Raises OSError.
    """
    folder.mkdir()
    items = [
        (key, block, math.prod(p.stop - p.start for p in block) * spec.dtype.itemsize)
        for key, spec in tensors.items()
        for block in blocks(spec)
    ]
    shares = _shares(items, thread_count())
    records: dict[str, FileRecord] = {}
    stop = threading.Event()

    def write_share(number: int) -> list[Placed]:
        name = f"__0_{number}.distcp"
        placed = []
        with _CheckedFile(folder / name) as file:
            for key, block, size in shares[number]:
                if stop.is_set():
                    break  # another has failed, and tells
                start = file.tell()
                shape = [part.stop - part.start for part in block]
                data = workspace.empty("block", shape, tensors[key].dtype)
                make(key, block, data)
                _save(data, file)
                placed.append(Placed(key, block, name, start, file.tell() - start))
                done(size)
            records[name] = file.close()
        return placed

    with ThreadPoolExecutor(1) as other, _no_checksums_in_archives():
        # its imports take a second, which passes meanwhile
        index = other.submit(importlib.import_module, _INDEX_MODULE)
        placed = in_threads(write_share, range(len(shares)), stop=stop)
        index.result().write_index(folder, tensors, [place for each in placed for place in each])
    _write(folder / "metadata.json", lambda file: file.write(json.dumps(_MEGATRON_FILES).encode()))
    _write(folder / "common.pt", lambda file: torch.save({}, file))
    return records


_Item = tuple[str, Slices, int]  # key, block, bytes


def _shares(items: Sequence[_Item], count: int) -> list[list[_Item]]:
    """Consecutive items, so that a source is read in its order, of about the same size."""
    total = sum(size for _, _, size in items)
    shares: list[list[_Item]] = [[] for _ in range(count)]
    before = 0
    for item in items:
        shares[min(count - 1, before * count // max(1, total))].append(item)
        before += item[2]
    return [share for share in shares if share]


@contextmanager
def _no_checksums_in_archives() -> Iterator[None]:
    """The manifest has one of the whole file; to compute both takes a third of the time."""
    options = torch.serialization
    if not hasattr(options, "set_crc32_options"):
        yield
        return
    before = options.get_crc32_options()
    options.set_crc32_options(False)
    try:
        yield
    finally:
        options.set_crc32_options(before)


def _save(block: Tensor, file: _CheckedFile) -> None:
    try:
        torch.save(block, file)
    except RuntimeError as error:  # the archive is cut off; by what, is its context
        cause = error.__context__
        raise cause if isinstance(cause, OSError) else error  # noqa: B904 (of itself)


class _CheckedFile:
    """A new file that knows size and checksum of what was written to it."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("xb")
        self._bytes = self._crc32 = 0

    def __enter__(self) -> _CheckedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, data: Any) -> int:
        self._crc32 = zlib.crc32(data, self._crc32)
        written = self._file.write(data)
        self._bytes += written
        return written

    def tell(self) -> int:
        return self._bytes

    def flush(self) -> None:
        pass

    def close(self) -> FileRecord:
        self._file.close()
        return FileRecord(self._bytes, f"{self._crc32:08x}")


def _write(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    with path.open("xb") as file:
        write(file)
