"""The index of a torch_dist folder: which blocks its tensors are cut into, and where they lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from gspo_megatron.checkpoint.hf.files_header import TensorSpec
from gspo_megatron.checkpoint.hf.offline_writer import Placed


class _Index(FileSystemWriter):
    """Writes `.metadata` without the place where the folder was made."""

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()


def write_index(folder: Path, tensors: Mapping[str, TensorSpec], placed: Sequence[Placed]) -> None:
    """Write `.metadata` for blocks that make up the tensors."""
    entries = {
        key: TensorStorageMetadata(TensorProperties(spec.dtype), torch.Size(spec.shape), [])
        for key, spec in tensors.items()
    }
    results = []
    for place in placed:
        offsets = torch.Size([part.start for part in place.block])
        sizes = torch.Size([part.stop - part.start for part in place.block])
        chunks = entries[place.key].chunks
        index = MetadataIndex(place.key, offsets, len(chunks))
        chunks.append(ChunkStorageMetadata(offsets, sizes))
        info = _StorageInfo(place.file, place.start, place.length)
        results.append(WriteResult(index, place.length, info))
    _Index(folder).finish(Metadata(entries), [results])
