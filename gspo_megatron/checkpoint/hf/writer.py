"""Writes a Hugging Face model folder as its tensors come, and shows it only when it is whole."""

from __future__ import annotations

import json
import os
import threading
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor

from gspo_megatron.checkpoint.hf.files_header import (
    TensorSpec,
    bounds,
    make_header,
    read_into,
    read_part,
    tensor_bytes,
    write_from,
)
from gspo_megatron.checkpoint.hf.writer_folder import (
    NewFolder,
    copy_file,
    hidden_place,
    told,
    write_file,
)

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


@dataclass
class _Written:
    """What of a tensor was written up to now."""

    bytes: int = 0
    crc32: int = 0


class HfWriter:
    """A folder of safetensors files under construction; a context manager.

        specs = {"model.norm.weight": TensorSpec(torch.bfloat16, (64,)), ...}
        with HfWriter(path, specs) as writer:
            writer.write("model.norm.weight", tensor)
            ...
            writer.seal()
            writer.publish({"config.json": config}, copies=[folder / "tokenizer.json"])

    All names, dtypes and shapes are known beforehand, and so is every tensor's place: tensors come
    in any order, whole or in blocks of rows, and go straight to their place. Until `publish` they
    lie in a hidden folder beside `path`, in files without their first bytes until `seal`, which no
    reader takes for safetensors; leaving the context without `publish` removes them. What a killed
    writer left is replaced by the next one.

    Several processes can write one folder: the `owner` makes it on entering the context and
    publishes it; between, each process writes and seals the tensors of whole `files` of its own.
    Several threads can write tensors of their own.

    With `read_back`, `seal` reads everything again and compares checksums; without it, that is left
    to the caller (`read_into`).

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
        read_back: bool = True,
    ) -> None:
        self._reads_back = read_back
        self.path = Path(path)
        self.tensors = dict(tensors)
        self.files = _plan(self.tensors, max_shard_bytes)
        self._folder = NewFolder(path, self.bytes) if owner else None
        self._partial = hidden_place(self.path)
        self._file_of = {name: file for file in self.files for name in file.offsets}
        self._written = {name: _Written() for name in self.tensors}
        self._descriptors: dict[str, int] = {}
        self._opening = threading.Lock()
        # the kernel lets one thread at a time write a file, and the others spin
        self._writing = {file.name: threading.Lock() for file in self.files}

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
        """Write a tensor, or the block of its rows that starts at `first_row`; the blocks of one
        tensor come in order. The dtype is the planned one, the device any."""
        spec, done = self.tensors[name], self._written[name]
        assert tensor.dtype == spec.dtype, f"{name}: {tensor.dtype}, planned {spec.dtype}"
        assert tensor.shape[1:] == spec.shape[1:], f"{name}: {tensor.shape} of {spec.shape}"
        width = spec.bytes // max(1, spec.shape[0]) if spec.shape else 0
        assert first_row * width == done.bytes, f"{name}: rows out of order"
        data = tensor_bytes(tensor.detach().cpu().contiguous())
        assert done.bytes + len(data) <= spec.bytes, f"{name}: more rows than planned"
        file = self._file_of[name]
        with told(self.path), self._writing[file.name]:
            write_from(self._descriptor(file), data, file.offsets[name] + done.bytes)
        if self._reads_back:
            done.crc32 = zlib.crc32(data, done.crc32)
        done.bytes += len(data)

    def read_into(self, name: str, slices: Sequence[slice] | None, out: Tensor) -> None:
        """Fill a contiguous tensor with what was written, by any process, of a tensor or a part of
        it."""
        spec, file = self.tensors[name], self._file_of[name]
        part = bounds(spec.shape, slices)
        read_part(self._descriptor(file), file.offsets[name], spec.shape, part, out)

    def seal(self, names: Iterable[str] | None = None) -> None:
        """Make these tensors, by default all, durable. They are all the tensors of their files, and
        written.

        Raises OSError where the disk gives back other bytes than it was given.
        """
        names = set(self.tensors if names is None else names)
        missing = [name for name in names if self._written[name].bytes < self.tensors[name].bytes]
        assert not missing, f"never written: {sorted(missing)[:5]}"
        for file in self.files:
            if not names.isdisjoint(file.offsets):
                assert names >= file.offsets.keys(), f"{file.name} is not this process's alone"
                if self._reads_back:
                    self._read_back(file)
                with told(self.path):
                    write_from(self._descriptor(file), memoryview(file.header), 0)
                    os.fsync(self._descriptor(file))

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

    def _read_back(self, file: _File) -> None:
        buffer = memoryview(bytearray(_BLOCK))
        for name, offset in file.offsets.items():
            crc32 = 0
            end = offset + self.tensors[name].bytes
            for start in range(offset, end, _BLOCK):
                block = buffer[: min(_BLOCK, end - start)]
                read_into(self._descriptor(file), block, start)
                crc32 = zlib.crc32(block, crc32)
            if crc32 != self._written[name].crc32:
                raise OSError(f"{self.path}: {file.name}: {name} is not what was written")

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
