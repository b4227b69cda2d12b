"""Reads Megatron-Core's torch_dist format: any part of any tensor, and no more of the files.

A folder of it has `.metadata`, which says into which blocks each tensor is cut and where each lies,
and files of blocks, each a zip archive as torch.save writes it with the tensor's bytes uncompressed
inside. torch's own reader reads whole blocks, which are as large as a rank's part of a tensor.
"""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from gspo_megatron.checkpoint.hf.files_header import TensorSpec, bounds, read_part
from gspo_megatron.checkpoint.hf.files_open import OpenFiles
from gspo_megatron.checkpoint.hf.offline_blocks import RowIndex, workspace
from gspo_megatron.checkpoint.hf.pieces import Slices
from gspo_megatron.checkpoint.restricted import read_index
from gspo_megatron.errors import DataError


class TorchDistReader:
    """The tensors of a folder, whatever layout they were written on.

    `tensors` has dtype and global shape of each by its key. Raises DataError where the folder's
    metadata cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        index = read_index(folder)
        self.tensors: dict[str, TensorSpec] = {}
        self._blocks: dict[str, RowIndex[_Block]] = {}
        self._files = OpenFiles()
        for key, stored in index.state_dict_metadata.items():
            if not isinstance(stored, TensorStorageMetadata):
                continue
            dtype = stored.properties.dtype
            self.tensors[key] = TensorSpec(dtype, tuple(stored.size))
            found = [
                _Block(tuple(chunk.offsets), tuple(chunk.sizes), dtype, place)
                for chunk in stored.chunks
                if (place := index.storage_data.get(MetadataIndex(key, chunk.offsets)))
            ]
            self._blocks[key] = RowIndex(
                (block.offset[0], block.size[0], block) if block.size else (0, 1, block)
                for block in found
            )

    def read_into(self, key: str, slices: Sequence[slice] | None, out: Tensor) -> None:
        """Fill a contiguous tensor with a part of one. Raises DataError where the blocks there are
        do not make it up."""
        part = bounds(self.tensors[key].shape, slices)
        found = 0
        for block in self._blocks[key].near(*(part[0] if part else (0, 1))):
            cut = block.cut(part)
            if cut is None:
                continue
            target = out[block.target(part, cut)]
            found += target.numel()
            if target.is_contiguous():
                self._read_block(key, block, cut, target)
            else:
                piece = workspace.empty("piece", target.shape, target.dtype)
                self._read_block(key, block, cut, piece)
                target.copy_(piece)
        if found != out.numel():
            raise DataError(f"{self.folder}: {key}: {found} of {out.numel()} elements are there")

    def _read_block(
        self, key: str, block: _Block, cut: Sequence[tuple[int, int]], out: Tensor
    ) -> None:
        with self._files.descriptor(self.folder / block.place.relative_path) as descriptor:
            if block.start is None:
                block.start = _find_bytes(descriptor, block)
            if block.start >= 0:
                read_part(descriptor, block.start, block.size, cut, out)
                return
            # not laid out plainly: all of it is read
            view = _View(descriptor, block.place)
            tensor = torch.load(view, map_location="cpu", weights_only=True)
        if not isinstance(tensor, Tensor) or tensor.shape != block.size:
            raise DataError(f"{self.folder}: {key}: a block is not of the index's shape")
        out.copy_(tensor[tuple(slice(at, at + size) for at, size in cut)])


@dataclass
class _Block:
    """A block of a tensor, and its archive's place; `start` is where its bytes begin in the file
    once that is known, -1 where the archive has them in another order."""

    offset: tuple[int, ...]
    size: tuple[int, ...]
    dtype: torch.dtype
    place: _StorageInfo
    start: int | None = None

    def cut(self, part: Sequence[tuple[int, int]]) -> list[tuple[int, int]] | None:
        """What of the block lies in a part of the tensor, counted from the block's beginning."""
        result = []
        for at, extent, (first, size) in zip(self.offset, self.size, part, strict=True):
            low, high = max(at, first), min(at + extent, first + size)
            if low >= high:
                return None
            result.append((low - at, high - low))
        return result

    def target(self, part: Sequence[tuple[int, int]], cut: Sequence[tuple[int, int]]) -> Slices:
        """Where that goes in the part."""
        starts = [
            at + low - first
            for at, (low, _), (first, _) in zip(self.offset, cut, part, strict=True)
        ]
        return tuple(slice(at, at + size) for at, (_, size) in zip(starts, cut, strict=True))


class _View(io.RawIOBase):
    """One archive of a file, for readers that want a file of its own. Reads by position: several
    threads may have views of one file."""

    def __init__(self, descriptor: int, place: _StorageInfo) -> None:
        super().__init__()
        self._descriptor, self._place, self._at = descriptor, place, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._place.length}[whence]
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        left = max(0, self._place.length - self._at)
        size = min(len(buffer), left)
        data = os.pread(self._descriptor, size, self._place.offset + self._at)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def _find_bytes(descriptor: int, block: _Block) -> int:
    """Where the tensor's bytes are, -1 where they are not one contiguous tensor of that shape."""
    view = _View(descriptor, block.place)
    try:
        # on the meta device the archive's tensor is described, and none of its bytes are read
        tensor = torch.load(view, map_location="meta", weights_only=True)
        plain = (
            isinstance(tensor, Tensor)
            and tensor.shape == block.size
            and tensor.dtype == block.dtype
            and tensor.is_contiguous()
            and tensor.storage_offset() == 0
        )
        with zipfile.ZipFile(view) as archive:  # type: ignore[arg-type]
            stored = [info for info in archive.infolist() if "/data/" in info.filename]
        if not plain or len(stored) != 1 or stored[0].compress_type != zipfile.ZIP_STORED:
            return -1
        # a local header: 30 bytes, the lengths of name and extra field in the last four
        view.seek(stored[0].header_offset + 26)
        name, extra = (int.from_bytes(view.read(2), "little") for _ in range(2))
    except (RuntimeError, zipfile.BadZipFile) as error:
        raise DataError(f"{block.place.relative_path}: damaged: {error}") from error
    return block.place.offset + stored[0].header_offset + 30 + name + extra
