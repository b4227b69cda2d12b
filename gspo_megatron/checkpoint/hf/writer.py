"""Writes a Hugging Face model folder as its tensors come, and shows it only when it is whole."""

from __future__ import annotations

import json
import os
import threading
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from gspo_megatron.checkpoint.hf.checksums import Extents
from gspo_megatron.checkpoint.hf.files_header import (
    TensorEntry,
    TensorSpec,
    make_header,
    name_of,
    read_header,
    read_into,
    tensor_bytes,
    write_from,
)
from gspo_megatron.checkpoint.hf.offline_blocks import workspace
from gspo_megatron.checkpoint.hf.offline_share import in_threads
from gspo_megatron.checkpoint.hf.writer_folder import (
    NewFolder,
    copy_file,
    hidden_place,
    told,
    write_file,
)

if TYPE_CHECKING:
    from torch import Tensor

SINGLE_FILE = "model.safetensors"
WEIGHT_INDEX = "model.safetensors.index.json"
MAX_SHARD_BYTES = 5_000_000_000  # as the published checkpoints have it

_METADATA = {"format": "pt"}  # transformers asks for it
_BLOCK = 4 << 20  # bytes read back at once


@dataclass(frozen=True)
class _File:
    """One file as planned; `offsets` are the places of its tensors in it."""

    name: str
    header: bytes
    offsets: Mapping[str, int]
    bytes: int


class HfWriter:
    """A folder of safetensors files under construction; a context manager.

        specs = {"model.norm.weight": TensorSpec(torch.bfloat16, (64,)), ...}
        with HfWriter(path, specs) as writer:
            writer.write("model.norm.weight", tensor)
            ...
            writer.seal()
            writer.publish({"config.json": config}, copies=[folder / "tokenizer.json"])

    All names, dtypes and shapes are known beforehand, and so is every tensor's place: tensors come
    in any order, whole or in blocks of rows, from any thread, and go straight to their place. Until
    `publish` they lie in a hidden folder beside `path`, in files without their first bytes until
    `seal`, which no reader takes for safetensors; leaving the context without `publish` removes
    them. What a killed writer left is replaced by the next one.

    Several processes can write one folder: the `owner` makes it on entering the context and
    publishes it; between, each process writes and seals the tensors of whole `files` of its own.

    Raises DataError where the destination cannot be written or has something in it already, and
    where the disk has no room for all of it.
    """

    def __init__(
        self,
        path: str | Path,
        tensors: Mapping[str, TensorSpec],
        *,
        max_shard_bytes: int = MAX_SHARD_BYTES,
        owner: bool = True,
    ) -> None:
        self.path = Path(path)
        self.tensors = dict(tensors)
        self.files = _plan(self.tensors, max_shard_bytes)
        self._folder = NewFolder(path, self.bytes) if owner else None
        self._partial = hidden_place(self.path)
        self._file_of = {name: file for file in self.files for name in file.offsets}
        self._written = {name: Extents() for name in self.tensors}
        self._descriptors: dict[str, int] = {}
        self._opening = threading.Lock()
        # the kernel lets one thread at a time write a file, and the others spin
        self._writing = {file.name: threading.Lock() for file in self.files}

    @property
    def folder(self) -> Path:
        """Where the files are until `publish`."""
        return self._partial

    @property
    def bytes(self) -> int:
        """Of all tensors."""
        return sum(spec.bytes for spec in self.tensors.values())

    def __enter__(self) -> HfWriter:
        if self._folder is None:
            return self
        self._folder.__enter__()
        try:
            with told(self.path):
                for file in self.files:
                    with (self._partial / file.name).open("xb") as stream:
                        stream.truncate(file.bytes)
        except BaseException:
            self._folder.__exit__(None, None, None)
            raise
        return self

    def write(self, name: str, tensor: Tensor, first_row: int = 0) -> None:
        """Write a tensor, or the block of its rows that starts at `first_row`. The dtype is the
        planned one, the device any."""
        spec = self.tensors[name]
        assert name_of(tensor.dtype) == spec.dtype, f"{name}: {tensor.dtype}, planned {spec.dtype}"
        assert tensor.shape[1:] == spec.shape[1:], f"{name}: {tensor.shape} of {spec.shape}"
        self.write_rows(name, tensor_bytes(tensor.detach().cpu().contiguous()), first_row)

    def write_rows(
        self, name: str, data: memoryview, first_row: int = 0, crc32: int | None = None
    ) -> None:
        """The same, of bytes, whose checksum may be known already."""
        spec, file = self.tensors[name], self._file_of[name]
        start = first_row * (spec.bytes // max(1, spec.shape[0])) if spec.shape else 0
        assert start + len(data) <= spec.bytes, f"{name}: more rows than planned"
        with told(self.path), self._writing[file.name]:
            write_from(self._descriptor(file), data, file.offsets[name] + start)
        if data:
            crc32 = zlib.crc32(data) if crc32 is None else crc32
            self._written[name].add(start, len(data), crc32)

    def seal(
        self, names: Iterable[str] | None = None, done: Callable[[int], None] = lambda _: None
    ) -> None:
        """Read these tensors, by default all, back and compare their checksums with what was given
        to `write`, calling done(bytes) now and then; then make their files durable. They are all
        the tensors of their files.

        Raises OSError where the disk gives back other bytes than it was given.
        """
        names = set(self.tensors if names is None else names)
        largest_first = sorted(names, key=lambda name: -self.tensors[name].bytes)
        in_threads(lambda name: self._read_back(name, done), largest_first)
        for file in self.files:
            if names.isdisjoint(file.offsets):
                continue
            assert names >= file.offsets.keys(), f"{file.name} is not this process's alone"
            with told(self.path):
                write_from(self._descriptor(file), memoryview(file.header), 0)
                os.fsync(self._descriptor(file))
            self._check_header(file)

    def publish(
        self, contents: Mapping[str, Mapping[str, Any]], copies: Iterable[Path] = ()
    ) -> None:
        """Add JSON files and copies of other files, and give the folder its name. The owner's part,
        once everything is sealed."""
        assert self._folder is not None, "the owner publishes"
        if len(self.files) > 1:
            contents = {**contents, WEIGHT_INDEX: self._index()}
        with told(self.path):
            for file in copies:
                if file.name not in contents:
                    copy_file(file, self._partial)
            for name, content in contents.items():
                text = json.dumps(content, indent=2, ensure_ascii=False)
                write_file(self._partial / name, text + "\n")
        self._folder.publish()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])
        if self._folder is not None:
            self._folder.__exit__(kind, error, traceback)

    def _read_back(self, name: str, done: Callable[[int], None]) -> None:
        file, size = self._file_of[name], self.tensors[name].bytes
        expected = self._written[name].crc32(size)
        assert expected is not None, f"never written, or only in part: {name}"
        crc32 = 0
        for start in range(0, size, _BLOCK):
            block = workspace.bytes("back", min(_BLOCK, size - start))
            read_into(self._descriptor(file), block, file.offsets[name] + start)
            crc32 = zlib.crc32(block, crc32)
            done(len(block))
        if crc32 != expected:
            raise OSError(f"{self.path}: {file.name}: {name} is not what was written")

    def _check_header(self, file: _File) -> None:
        """What a reader will find is what was planned."""
        problems: list[str] = []
        path = self._partial / file.name
        found = read_header(path, problems)
        planned = {
            name: TensorEntry(self.tensors[name].dtype, self.tensors[name].shape, path, offset)
            for name, offset in file.offsets.items()
        }
        if problems or found != planned:
            raise OSError(f"{self.path}: {file.name}: its header is not what was written")

    def _index(self) -> dict[str, Any]:
        names = {name: file.name for file in self.files for name in file.offsets}
        return {"metadata": {"total_size": self.bytes}, "weight_map": dict(sorted(names.items()))}

    def _descriptor(self, file: _File) -> int:
        with self._opening:
            if file.name not in self._descriptors:
                self._descriptors[file.name] = os.open(self._partial / file.name, os.O_RDWR)
            return self._descriptors[file.name]


def _plan(tensors: Mapping[str, TensorSpec], max_shard_bytes: int) -> list[_File]:
    """Tensors in their order, as many to a file as fit."""
    groups: list[dict[str, TensorSpec]] = [{}]
    room = max_shard_bytes
    for name, spec in tensors.items():
        if groups[-1] and spec.bytes > room:
            groups.append({})
            room = max_shard_bytes
        groups[-1][name] = spec
        room -= spec.bytes
    files = []
    for number, group in enumerate(groups, start=1):
        name = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        header, offsets = make_header(group, _METADATA)
        size = len(header) + sum(spec.bytes for spec in group.values())
        files.append(_File(name if len(groups) > 1 else SINGLE_FILE, header, offsets, size))
    return files
