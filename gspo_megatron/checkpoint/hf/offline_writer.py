"""Writes Megatron-Core's torch_dist format from pieces that come in any order.

torch's own writer keeps a block of every tensor in memory until its file is done.
"""

from __future__ import annotations

import bisect
import json
import os
import threading
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from gspo_megatron.checkpoint.hf.checksums import Extents, combine
from gspo_megatron.checkpoint.hf.files_header import TensorSpec, run_at, write_from
from gspo_megatron.checkpoint.hf.offline_archive import around_tensor, empty_archive
from gspo_megatron.checkpoint.hf.offline_blocks import blocks
from gspo_megatron.checkpoint.hf.offline_index import Block, dump_index
from gspo_megatron.checkpoint.hf.pieces import Box, Slices
from gspo_megatron.checkpoint.hf.writer_folder import told
from gspo_megatron.checkpoint.index_rules import INDEX
from gspo_megatron.checkpoint.manifest import FileRecord

# What Megatron-Core's dist_checkpointing writes beside the tensors, for a checkpoint of tensors.
_MEGATRON_FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


@dataclass(frozen=True)
class _Planned:
    """A block as it will be: its first byte in the tensor, and where its bytes go in the file."""

    spec: TensorSpec
    block: Block
    first: int
    place: int
    written: Extents = field(default_factory=Extents)


class TorchDistWriter:
    """A folder of tensors under construction; a context manager.

    Sizes and places of all blocks are known beforehand, so pieces go straight to their place, from
    several threads. Nothing is waited for to be on the disk. What the user can mend is told of
    `path`, else raises OSError.
    """

    def __init__(
        self, folder: Path, tensors: Mapping[str, TensorSpec], files: int, path: Path
    ) -> None:
        self._folder, self._tensors, self._path = folder, tensors, path
        self._planned: dict[str, list[_Planned]] = {}
        self.sizes: dict[str, int] = {}  # of the files of blocks
        total, before = sum(spec.bytes for spec in tensors.values()), 0
        for key, spec in tensors.items():
            self._planned[key] = []
            for slices in blocks(spec):
                file = f"__0_{before * files // max(1, total)}.distcp"
                planned = _plan(spec, slices, file, self.sizes.get(file, 0))
                self._planned[key].append(planned)
                self.sizes[file] = planned.block.start + planned.block.length
                before += planned.spec.bytes
        self._descriptors: dict[str, int] = {}
        # the kernel lets one thread at a time write a file, and the others spin
        self._writing = {file: threading.Lock() for file in self.sizes}

    def __enter__(self) -> TorchDistWriter:
        with told(self._path):
            self._folder.mkdir()
            for name in self.sizes:
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
                self._descriptors[name] = os.open(self._folder / name, flags, 0o666)
        return self

    def file_of(self, key: str, box: Box) -> str:
        """The file that a box of a tensor goes to, at least its beginning."""
        return self._planned[key][self._find(key, box)[0]].block.file

    def write(self, key: str, box: Box, data: memoryview) -> int:
        """Write a box of a tensor that is one run of its elements. Returns the checksum."""
        number, at = self._find(key, box)
        crc32 = 0
        while data:
            planned = self._planned[key][number]
            inside = at - planned.first
            part = data[: planned.spec.bytes - inside]
            file, crc32_of_part = planned.block.file, zlib.crc32(part)
            with told(self._path), self._writing[file]:
                write_from(self._descriptors[file], part, planned.place + inside)
            planned.written.add(inside, len(part), crc32_of_part)
            crc32 = combine(crc32, crc32_of_part, len(part))
            data, at, number = data[len(part) :], at + len(part), number + 1
        return crc32

    def _find(self, key: str, box: Box) -> tuple[int, int]:
        """The first block that a box goes to, and its first byte in the tensor."""
        spec = self._tensors[key]
        first = run_at(spec.shape, box.target, box.size)
        assert first is not None, f"{key}: {box} is several runs"
        at = first * spec.item_bytes
        return bisect.bisect_right(self._planned[key], at, key=lambda each: each.first) - 1, at

    def finish(self) -> dict[str, FileRecord]:
        """Write what belongs around the tensors. Returns size and checksum of each file of blocks,
        made of what was given to `write`."""
        checksums = dict.fromkeys(self.sizes, 0)
        with told(self._path):
            for key, planned in self._planned.items():
                for each in planned:
                    name, crc32 = each.block.file, each.written.crc32(each.spec.bytes)
                    assert crc32 is not None, f"{key}: not all of it was written"
                    before, after = around_tensor(each.spec, crc32)
                    end = each.place + each.spec.bytes
                    write_from(self._descriptors[name], memoryview(before), each.block.start)
                    write_from(self._descriptors[name], memoryview(after), end)
                    whole = combine(zlib.crc32(before, checksums[name]), crc32, each.spec.bytes)
                    checksums[name] = zlib.crc32(after, whole)
            blocks_of = {key: [each.block for each in p] for key, p in self._planned.items()}
            for name, data in (
                (INDEX, dump_index(self._tensors, blocks_of)),
                ("metadata.json", json.dumps(_MEGATRON_FORMAT).encode()),
                ("common.pt", empty_archive()),
            ):
                (self._folder / name).write_bytes(data)
        return {
            name: FileRecord(size, f"{checksums[name]:08x}") for name, size in self.sizes.items()
        }

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])


def _plan(spec: TensorSpec, slices: Slices, file: str, start: int) -> _Planned:
    offset = tuple(part.start for part in slices)
    size = tuple(part.stop - part.start for part in slices)
    part = TensorSpec(spec.dtype, size)
    before, after = around_tensor(part, 0)
    block = Block(offset, size, file, start, len(before) + part.bytes + len(after))
    first = run_at(spec.shape, offset, size)
    assert first is not None, "blocks are of whole rows"
    return _Planned(part, block, first * spec.item_bytes, start + len(before))
