"""The index of a torch_dist folder: which blocks its tensors are cut into, and where they lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo_megatron.checkpoint.hf.files_header import DTYPE_NAMES, DTYPES, TensorSpec
from gspo_megatron.checkpoint.hf.offline_pickle import Call, Made, Name, dump, load
from gspo_megatron.checkpoint.index_rules import INDEX, check_index, read_pickle
from gspo_megatron.errors import DataError

_METADATA = "torch.distributed.checkpoint.metadata"
_INFO = Name("torch.distributed.checkpoint.filesystem", "_StorageInfo")


@dataclass(frozen=True)
class Block:
    """A block of a tensor, and the place of its archive."""

    offset: tuple[int, ...]
    size: tuple[int, ...]
    file: str
    start: int  # byte in the file
    length: int


def dump_index(tensors: Mapping[str, TensorSpec], blocks: Mapping[str, Sequence[Block]]) -> bytes:
    """`.metadata`, as torch.distributed.checkpoint writes it, of tensors in these blocks."""
    entries, places = {}, {}
    for key, spec in tensors.items():
        chunks = []
        for number, block in enumerate(blocks[key]):
            offset, size = _size(block.offset), _size(block.size)
            chunks.append(_record("ChunkStorageMetadata", offsets=offset, sizes=size))
            place = _record("MetadataIndex", fqn=key, offset=offset, index=number)
            where = {"relative_path": block.file, "offset": block.start, "length": block.length}
            places[place] = Made(_INFO, where)
        properties = _properties(spec.dtype)
        size = _size(spec.shape)
        entries[key] = _record(
            "TensorStorageMetadata", properties=properties, size=size, chunks=chunks
        )
    return dump(_record("Metadata", state_dict_metadata=entries, storage_data=places))


def load_index(folder: Path) -> tuple[dict[str, TensorSpec], dict[str, list[Block]]]:
    """The tensors of a folder by their keys, and the blocks of each.

    Raises DataError where the index is missing, damaged or foreign, or where a file that it names
    is missing or shorter than it says.
    """
    data = read_pickle(folder)
    try:
        index = load(data)
    except Exception as error:  # noqa: BLE001 (a damaged pickle raises just about anything)
        raise DataError(f"{folder / INDEX}: not an index of a checkpoint: {error}") from None
    check_index(index, folder)
    places = {
        (place.fqn, getattr(place, "offset", None)): info
        for place, info in index.storage_data.items()
    }
    tensors, blocks = {}, {}
    for key, entry in index.state_dict_metadata.items():
        if not hasattr(entry, "chunks"):
            continue  # not a tensor
        dtype = DTYPE_NAMES.get(entry.properties.arguments[0].__name__)
        if dtype is None:
            raise DataError(f"{folder / INDEX}: {key}: of a dtype that no weights have")
        tensors[key] = TensorSpec(dtype, entry.size)
        found = [(chunk, places[key, chunk.offsets]) for chunk in entry.chunks]
        blocks[key] = [
            Block(chunk.offsets, chunk.sizes, info.relative_path, info.offset, info.length)
            for chunk, info in found
        ]
    return tensors, blocks


def _record(name: str, **state: Any) -> Made:
    return Made(Name(_METADATA, name), state)


def _size(sizes: Sequence[int]) -> Call:
    return Call(Name("torch", "Size"), (tuple(sizes),))


def _properties(dtype: str) -> Made:
    layout = Call(Name("torch.serialization", "_get_layout"), ("torch.strided",))
    contiguous = Call(Name(_METADATA, "_MEM_FORMAT_ENCODING"), (0,))
    state = (Name("torch", DTYPES[dtype].name), layout, False, contiguous, False)
    return Made(Name(_METADATA, "TensorProperties"), state)
