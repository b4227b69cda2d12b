"""Writes new folders that get their names when they are complete, and HF models in such folders."""

from __future__ import annotations

import fcntl
import itertools
import json
import math
import os
import shutil
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gspo_megatron.errors import DataError
from gspo_megatron.families.weight_map import Box
from gspo_megatron.files import (
    SETTLED,
    SINGLE_FILE,
    WEIGHT_INDEX,
    folder_lacks,
    make_folder,
    os_errors,
    settle,
    sync,
    sync_folders,
)
from gspo_megatron.hf.files import DTYPES

MAX_SHARD_BYTES = 5_000_000_000  # as in most published checkpoints

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class NewFolder:
    """A context manager that makes a folder. Files go to `partial`, a hidden folder beside `path`.
    `publish` renames it to `path`. If `publish` is not called, the hidden folder is removed at the
    end. The hidden folder of a killed process is replaced.

    owner: False if another process, the owner, makes and publishes the folder.
    durable: False if nothing waits for the disk. Then a crash of the machine may lose or damage the
    folder.
    reuse: a folder that nobody reads any more. If it exists, it becomes the new folder, with all
    its files.
    private: no other user may read the folder.

    Raises DataError if `path` is not empty, cannot be written, or is being written by another
    process, or if the disk has less than `size` bytes free.
    """

    def __init__(
        self,
        path: str | Path,
        size: int,
        *,
        owner: bool = True,
        durable: bool = True,
        reuse: Path | None = None,
        private: bool = False,
    ) -> None:
        self.path = Path(path)
        self.partial = _hidden_place(self.path)
        self.durable, self.reuse, self.private = durable, reuse, private
        self._size, self._owner = size, owner
        self._lock: int | None = None

    def __enter__(self) -> Any:
        if not self._owner:
            return self
        check_destination(self.path)
        with os_errors(self.path, "cannot be written"):
            make_folder(self.partial.parent)
            if self.partial.exists():
                lock = self._lock_partial()
                try:
                    shutil.rmtree(self.partial)
                finally:
                    os.close(lock)
            if self.reuse is not None and self.reuse.is_dir():
                self.reuse.rename(self.partial)
            else:
                free = shutil.disk_usage(self.partial.parent).free
                if self._size > free:
                    wrong = f"{self._size:,} bytes to write, {free:,} are free"
                    raise DataError(f"{self.path}: {wrong}")
                self.partial.mkdir(0o700 if self.private else 0o777)
            self._lock = self._lock_partial()
        return self

    def _lock_partial(self) -> int:
        """Lock the hidden folder, as long as this process runs, and return a descriptor that keeps
        the lock until it is closed. Raises DataError if another process has the lock."""
        descriptor = os.open(self.partial, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Another process may have replaced the folder before the call of flock.
            if os.path.samestat(os.fstat(descriptor), self.partial.stat()):
                return descriptor
        except (BlockingIOError, FileNotFoundError):
            pass
        os.close(descriptor)
        raise DataError(f"{self.path}: another process is writing to it")

    def publish(self) -> None:
        """Rename the hidden folder to `path`. If durable, sync the folders; the files are synced
        already."""
        with os_errors(self.path, "cannot be written"):
            if self.durable:
                sync_folders(self.partial)
            self.partial.rename(os.path.realpath(self.path))
            if self.durable:
                sync(self.partial.parent)

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            shutil.rmtree(self.partial, ignore_errors=True)  # after `publish` it does not exist
            os.close(self._lock)
            self._lock = None


@dataclass(frozen=True)
class _File:
    """One planned file. `offsets` are the positions of its tensors in bytes."""

    name: str
    header: bytes
    offsets: Mapping[str, int]


class HfWriter(NewFolder):
    """A folder of safetensors files.

        with HfWriter(path, {"model.norm.weight": torch.empty(64, device="meta")}) as writer:
            writer.write("model.norm.weight", tensor)
            writer.finish()
            writer.publish({"config.json": config}, copies=[folder / "tokenizer.json"])

    Tensors may come in any order, whole or in blocks, from any thread. A tensor or block is written
    immediately (safetensors' save_file would need all tensors of a file in memory). Until `finish`,
    the files are invalid for readers. Several processes can write one folder, if all tensors of
    each of the `files` come from one process.
    """

    def __init__(
        self,
        path: str | Path,
        tensors: Mapping[str, Tensor],
        *,
        max_shard_bytes: int = MAX_SHARD_BYTES,
        single_file: str = SINGLE_FILE,
        owner: bool = True,
        durable: bool = True,
        reuse: Path | None = None,
        private: bool = False,
    ) -> None:
        """single_file: the file's name if one file is enough; reuse: a folder of the same tensors,
        in a file system in memory. Overwriting it is faster than writing new files, because the
        system need not find and clear memory."""
        self.tensors = dict(tensors)
        self.bytes = sum(planned.nbytes for planned in self.tensors.values())
        options = {"durable": durable, "reuse": reuse, "private": private}
        super().__init__(path, self.bytes, owner=owner, **options)
        self.files = _plan(self.tensors, max_shard_bytes, single_file)
        self._file_of = {name: file for file in self.files for name in file.offsets}
        self._missing = {name: planned.nbytes for name, planned in self.tensors.items()}
        self._descriptors: dict[str, int] = {}
        # for each file, the bytes that are perhaps not on the disk yet
        self._unsettled = dict.fromkeys((file.name for file in self.files), 0)
        # The kernel lets only one thread at a time write to a file. Without the lock, other threads
        # would wait in a busy loop.
        self._writing = threading.Lock()
        # For boxes whose elements are not contiguous in the HF tensor: (tensor's name, index on the
        # first axis) -> the elements collected so far, and the number of missing elements.
        self._parts: dict[tuple[str, int], tuple[Tensor, int]] = {}

    def write_box(self, box: Box, part: Tensor) -> None:
        """Write the elements of a box, in the order of the HF tensor and in the planned dtype.

        If the box's elements are not contiguous in the HF tensor, they are collected. Each index of
        the first axis is written when all its elements are there, because single elements would
        need a system call each.
        """
        planned = self.tensors[box.name]
        part = part.to(planned.dtype)
        if box.is_plain:
            self.write(box.name, part, box.source_slices)
            return
        assert len(part) == 1, "more than one index of the first axis"
        first = box.source_slices[0]
        with self._writing:
            whole, missing = self._parts.pop((box.name, first.start), (None, 0))
            if whole is None:
                whole = torch.empty((1, *planned.shape[1:]), dtype=planned.dtype)
                missing = whole.numel()
            whole[(slice(0, 1), *box.source_slices[1:])] = part
            missing -= box.numel
            if missing:
                self._parts[box.name, first.start] = whole, missing
        if not missing:
            rest = [slice(0, size) for size in planned.shape[1:]]
            self.write(box.name, whole, [first, *rest])

    def write(self, name: str, tensor: Tensor, slices: Sequence[slice] | None = None) -> None:
        """Write a tensor, or its block at `slices`. It must have the planned dtype."""
        dtype, shape = self.tensors[name].dtype, self.tensors[name].shape
        slices = [slice(0, extent) for extent in shape] if slices is None else slices
        assert tensor.dtype == dtype, f"{name}: {tensor.dtype}, planned {dtype}"
        sizes = [part.stop - part.start for part in slices]
        assert list(tensor.shape) == sizes, f"{name}: {tensor.shape}, expected {sizes}"
        if not tensor.numel():
            return
        flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        offsets = list(_run_offsets(shape, slices))
        size = len(flat) // len(offsets)
        file = self._file_of[name]
        with os_errors(self.path, "cannot be written"), self._writing:
            for number, offset in enumerate(offsets):
                at = file.offsets[name] + offset * dtype.itemsize
                self._write(file, memoryview(flat[number * size : (number + 1) * size]), at)
            self._missing[name] -= len(flat)
            self._unsettled[file.name] += len(flat)
            is_due = self.durable and self._unsettled[file.name] >= SETTLED
            if is_due:
                self._unsettled[file.name] = 0
        if is_due:  # outside the lock, so that other threads can write
            with os_errors(self.path, "cannot be written"):
                settle(self._descriptors[file.name])

    def finish(self, files: Iterable[_File] | None = None) -> None:
        """Complete these files (default: all). If durable, wait until they are on the disk."""
        for file in self.files if files is None else files:
            for name in file.offsets:
                assert self._missing[name] == 0, f"never written, or only in part: {name}"
            with os_errors(self.path, "cannot be written"):
                self._write(file, memoryview(file.header), 0)
                if self.durable:
                    settle(self._descriptors[file.name])

    def publish(
        self, contents: Mapping[str, Mapping[str, Any]] = {}, copies: Iterable[Path] = ()
    ) -> None:
        """Add JSON files and copies of other files, and rename the folder. The owner calls this
        method after all files are finished."""
        if len(self.files) > 1:
            names = {name: file.name for name, file in sorted(self._file_of.items())}
            index = {"metadata": {"total_size": self.bytes}, "weight_map": names}
            contents = {**contents, WEIGHT_INDEX: index}
        with os_errors(self.path, "cannot be written"):
            copies = [file for file in copies if file.name not in contents]
            for file in copies:
                shutil.copyfile(file, self.partial / file.name)
            for name, content in contents.items():
                text = json.dumps(content, indent=2, ensure_ascii=False)
                (self.partial / name).write_bytes(f"{text}\n".encode())
            for name in (*contents, *(file.name for file in copies)):
                if self.private:  # as private as the folder
                    (self.partial / name).chmod(0o600)
                if self.durable:
                    sync(self.partial / name)
        super().publish()

    def __exit__(self, *error: object) -> None:
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])
        super().__exit__(*error)

    def _write(self, file: _File, data: memoryview, offset: int) -> None:
        if file.name not in self._descriptors:
            flags = os.O_WRONLY | os.O_CREAT | (os.O_EXCL if self.reuse is None else 0)
            mode = 0o600 if self.private else 0o666
            self._descriptors[file.name] = os.open(self.partial / file.name, flags, mode)
            if self.reuse is not None:  # clear the old header: the file is invalid now
                os.pwrite(self._descriptors[file.name], bytes(len(file.header)), 0)
        while data:
            count = os.pwrite(self._descriptors[file.name], data, offset)
            data, offset = data[count:], offset + count


def _run_offsets(shape: Sequence[int], slices: Sequence[slice]) -> Iterator[int]:
    """Yield the index of the first element of each run of consecutive elements in a block of a
    tensor."""
    whole = len(shape)
    while whole and slices[whole - 1] == slice(0, shape[whole - 1]):
        whole -= 1
    # From dimension `whole` on, the block has all elements, so a run covers these dimensions and
    # the one before.
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    starts = [part.start for part in slices]
    for index in itertools.product(*(range(s.start, s.stop) for s in slices[: max(0, whole - 1)])):
        first = [*index, *starts[len(index) :]]
        yield sum(at * stride for at, stride in zip(first, strides))


def _plan(tensors: Mapping[str, Tensor], max_shard_bytes: int, single_file: str) -> list[_File]:
    """Plan the files: tensors in their order, and as many in a file as fit."""
    groups: list[dict[str, Tensor]] = [{}]
    room = max_shard_bytes
    for name, planned in tensors.items():
        if groups[-1] and planned.nbytes > room:
            groups.append({})
            room = max_shard_bytes
        groups[-1][name] = planned
        room -= planned.nbytes
    if len(groups) == 1:
        return [_file(single_file, groups[0])]
    return [
        _file(f"model-{number:05d}-of-{len(groups):05d}.safetensors", group)
        for number, group in enumerate(groups, start=1)
    ]


def _file(file_name: str, tensors: Mapping[str, Tensor]) -> _File:
    """Plan a file: 8 bytes (length of the header, little endian), a JSON header (name -> dtype,
    shape, data_offsets), and the bytes of the tensors.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers requires it
    ends = list(itertools.accumulate((planned.nbytes for planned in tensors.values()), initial=0))
    for (name, planned), begin, end in zip(tensors.items(), ends, ends[1:]):
        dtype, shape = _DTYPE_NAMES[planned.dtype], list(planned.shape)
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # the format aligns the data
    header = len(text).to_bytes(8, "little") + text
    offsets = {name: len(header) + begin for name, begin in zip(tensors, ends)}
    return _File(file_name, header, offsets)


def _hidden_place(path: Path) -> Path:
    """Return the path of the hidden folder beside `path`, in which the new folder is made."""
    # A path such as "." has no parent in its text. If the path is a link to an empty folder, the
    # new folder replaces that folder, and the link stays.
    absolute = Path(os.path.realpath(path))
    return absolute.parent / f".{absolute.name}.partial"


def check_destination(path: Path) -> None:
    """Raise DataError unless `path` is new or an empty folder, and a folder can be made there."""
    if path.is_dir():
        if any(path.iterdir()):
            raise DataError(f"{path}: has files in it already; give a new or an empty folder")
        if os.path.ismount(os.path.realpath(path)):  # nothing can be renamed to it
            raise DataError(f"{path}: is a mount point; give a new folder in it")
    elif path.exists() or path.is_symlink():
        raise DataError(f"{path}: exists and is not a folder")
    lacks = folder_lacks(_hidden_place(path).parent)
    if lacks is not None:
        raise DataError(f"{path}: cannot be made: {lacks}")


def copy_file(source: Path, folder: Path) -> None:
    """Copy a file's contents into a folder, and wait until they are on the disk."""
    shutil.copyfile(source, folder / source.name)
    sync(folder / source.name)
