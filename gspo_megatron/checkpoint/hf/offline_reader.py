"""Reads Megatron-Core's torch_dist format: any part of any tensor, and no more of the files.

A folder of it has `.metadata`, which says into which blocks each tensor is cut and where each lies,
and files of blocks, each a zip archive as torch.save writes it with the tensor's bytes uncompressed
inside. torch's own reader reads whole blocks, which are as large as a rank's part of a tensor.
"""

from __future__ import annotations

import io
import math
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gspo_megatron.checkpoint.hf.checksums import Extents
from gspo_megatron.checkpoint.hf.files_header import (
    TensorSpec,
    bounds,
    read_into,
    read_part,
    run_at,
    tensor_bytes,
)
from gspo_megatron.checkpoint.hf.files_open import OpenFiles
from gspo_megatron.checkpoint.hf.offline_archive import find_bytes
from gspo_megatron.checkpoint.hf.offline_blocks import BLOCK_BYTES, RowIndex, workspace
from gspo_megatron.checkpoint.hf.offline_index import Block, load_index
from gspo_megatron.checkpoint.manifest import Files
from gspo_megatron.errors import DataError

_Part = Sequence[tuple[int, int]]  # first index and size, for each dimension


class TorchDistReader:
    """The tensors of a folder, whatever layout they were written on.

    `tensors` has dtype and global shape of each by its key. Raises DataError where the folder's
    metadata cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tensors, blocks = load_index(folder)
        self._blocks = {
            key: RowIndex((*_rows(block), block) for block in listed)
            for key, listed in blocks.items()
        }
        self._files = OpenFiles()
        # where the bytes of a block's tensor begin, once that is known; -1: not laid out plainly
        self._starts: dict[Block, int] = {}
        self._read: dict[str, Extents] = {
            block.file: Extents() for listed in blocks.values() for block in listed
        }

    def read_into(self, key: str, slices: Sequence[slice] | None, out: memoryview) -> int:
        """Fill `out` with the bytes of a part of a tensor; returns their checksum. Raises DataError
        where the blocks there are do not make it up, or are damaged."""
        spec = self.tensors[key]
        part = bounds(spec.shape, slices)
        whole, found = Extents(), 0
        for block in self._blocks[key].near(*(part[0] if part else (0, 1))):
            cut = _cut(block, part)
            if cut is not None:
                found += self._read_cut(block, spec.dtype, cut, part, out, whole)
        if found != len(out):
            raise DataError(f"{self.folder}: {key}: {found} of {len(out)} bytes are there")
        crc32 = whole.crc32(len(out))
        return zlib.crc32(out) if crc32 is None else crc32

    def damage(self, files: Files) -> list[str]:
        """What is wrong with files of the folder by the manifest's word: most of them is what
        was read already, the rest is read now. Nothing was read twice."""
        wrong = []
        for path, record in files.items():
            name = Path(path).name
            extents = self._read.setdefault(name, Extents())
            with self._files.descriptor(self.folder / name) as descriptor:
                for start, length in extents.gaps(record.bytes):
                    for at in range(start, start + length, BLOCK_BYTES):
                        data = workspace.bytes("gap", min(BLOCK_BYTES, start + length - at))
                        read_into(descriptor, data, at)
                        extents.add(at, len(data), zlib.crc32(data))
            crc32 = extents.crc32(record.bytes)
            if crc32 is None or f"{crc32:08x}" != record.crc32:
                wrong.append(f"{path}: altered, its checksum is not the manifest's")
        return wrong

    def _read_cut(
        self, block: Block, dtype: str, cut: _Part, part: _Part, out: memoryview, whole: Extents
    ) -> int:
        """Read what a block has of a part to its place there; returns the bytes."""
        spec = TensorSpec(dtype, block.size)
        sizes = [size for _, size in cut]
        size = math.prod(sizes) * spec.item_bytes
        extents = [extent for _, extent in part]
        starts = [at + low - first for at, (low, _), (first, _) in zip(block.offset, cut, part)]
        at = run_at(extents, starts, sizes)
        if at is not None:
            at *= spec.item_bytes
            crc32 = self._read_block(block, spec, cut, out[at : at + size])
            whole.add(at, size, crc32)
            return size
        import numpy as np

        piece = workspace.bytes("part", size)
        self._read_block(block, spec, cut, piece)
        # the last dimension is counted in bytes here
        for each in (extents, starts, sizes):
            each[-1] *= spec.item_bytes
        place = tuple(slice(at, at + n) for at, n in zip(starts, sizes, strict=True))
        target = np.frombuffer(out, np.uint8).reshape(extents)
        target[place] = np.frombuffer(piece, np.uint8).reshape(sizes)
        return size

    def _read_block(self, block: Block, spec: TensorSpec, cut: _Part, out: memoryview) -> int:
        """Read a part of a block; returns the checksum."""
        with self._files.descriptor(self.folder / block.file) as descriptor:
            start = self._starts.get(block)
            if start is None:
                start = self._starts[block] = _find(descriptor, block, spec)
            if start < 0:
                _read_as_torch(descriptor, block, cut, out)
                return zlib.crc32(out)
            read_part(descriptor, block.start + start, spec, cut, out)
        crc32 = zlib.crc32(out)
        run = run_at(block.size, [low for low, _ in cut], [size for _, size in cut])
        if run is not None:
            place = block.start + start + run * spec.item_bytes
            self._read[block.file].add(place, len(out), crc32)
        return crc32


def _read_as_torch(descriptor: int, block: Block, cut: _Part, out: memoryview) -> None:
    """Of an archive that is not laid out plainly, all is read."""
    import torch

    try:
        tensor = torch.load(_View(descriptor, block), map_location="cpu", weights_only=True)
        assert tuple(tensor.shape) == block.size, "not of the index's shape"
    except Exception as error:
        raise DataError(f"{block.file}: damaged: {error}") from error
    wanted = tensor[tuple(slice(at, at + size) for at, size in cut)]
    out[:] = tensor_bytes(wanted.contiguous())


def _rows(block: Block) -> tuple[int, int]:
    return (block.offset[0], block.size[0]) if block.size else (0, 1)


def _cut(block: Block, part: _Part) -> list[tuple[int, int]] | None:
    """What of a block lies in a part of the tensor, counted from the block's beginning."""
    result = []
    for at, extent, (first, size) in zip(block.offset, block.size, part, strict=True):
        low, high = max(at, first), min(at + extent, first + size)
        if low >= high:
            return None
        result.append((low - at, high - low))
    return result


def _find(descriptor: int, block: Block, spec: TensorSpec) -> int:
    try:
        return find_bytes(_View(descriptor, block), spec)
    except Exception as error:
        raise DataError(f"{block.file}: damaged: {error}") from error


class _View(io.RawIOBase):
    """One archive of a file, for readers that want a file of its own. Reads by position: several
    threads may have views of one file."""

    def __init__(self, descriptor: int, block: Block) -> None:
        super().__init__()
        self._descriptor, self._block, self._at = descriptor, block, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._block.length}[whence]
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        left = max(0, self._block.length - self._at)
        size = min(len(buffer), left)
        data = os.pread(self._descriptor, size, self._block.start + self._at)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)
