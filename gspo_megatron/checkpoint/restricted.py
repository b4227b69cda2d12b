"""The index of a torch_dist folder, read without trusting it.

torch.distributed.checkpoint writes `.metadata` as a pickle, and reading a pickle runs what it
names. Here it may name only the plain records that such an index is made of, and what it says is
held against the folder before anything is read.
"""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata

from gspo_megatron.errors import DataError

INDEX = ".metadata"

# module -> names; `torch` stands for its dtypes, layouts and memory formats too.
_RECORDS = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    # Megatron-Core's own saving adds its plans
    "torch.distributed.checkpoint.planner": {
        "BytesIOWriteData",
        "SavePlan",
        "TensorWriteData",
        "WriteItem",
        "WriteItemType",
    },
    "pathlib": {"PosixPath", "PurePosixPath"},
    "pathlib._local": {"PosixPath", "PurePosixPath"},
}


class _Properties(TensorProperties):
    """A newer torch tells more of a tensor at the end, and an older one cannot take it."""

    def __setstate__(self, state: tuple) -> None:
        try:
            super().__setstate__(state)
        except ValueError:
            super().__setstate__(state[:5])


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name == TensorProperties.__name__:
            return _Properties
        if name in _RECORDS.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(value := getattr(torch, name, None), torch.dtype):
            return value
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")


def read_index(folder: Path) -> Metadata:
    """The index of a folder in Megatron-Core's torch_dist format.

    Raises DataError where the folder or its index is missing, damaged or foreign, or where a file
    that it names is missing or shorter than it says.
    """
    path = folder / INDEX
    try:
        with path.open("rb") as file:
            index = _Unpickler(file).load()
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; is this the folder of a checkpoint?") from None
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None
    except Exception as error:  # noqa: BLE001 (a damaged pickle raises just about anything)
        raise DataError(f"{path}: not an index of a checkpoint: {error}") from None
    try:
        problems = _check(index, folder)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        problems = [f"{path}: not an index of a checkpoint: {error}"]
    if problems:
        raise DataError("\n".join(problems))
    return index


def _check(index: Any, folder: Path) -> list[str]:
    path = folder / INDEX
    if not isinstance(index, Metadata):
        return [f"{path}: not an index of a checkpoint, but a {type(index).__name__}"]
    ends: dict[str, int] = {}
    problems = []
    places = set()
    for place, info in index.storage_data.items():
        name = info.relative_path
        if not isinstance(name, str) or Path(name).name != name or info.transform_descriptors:
            return [f"{path}: names {name!r}, which is not a file of this folder"]
        ends[name] = max(ends.get(name, 0), info.offset + info.length)
        places.add((place.fqn, place.offset))
    for key, entry in index.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            continue
        stored = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
        offsets = {chunk.offsets for chunk in entry.chunks}
        found = all((key, offset) in places for offset in offsets)
        if stored != math.prod(entry.size) or len(offsets) != len(entry.chunks) or not found:
            problems.append(f"{path}: {key} is not whole: {stored} of {math.prod(entry.size)}")
    for name, end in sorted(ends.items()):
        file = folder / name
        size = file.stat().st_size if file.is_file() else None
        if size is None:
            problems.append(f"{file}: no such file")
        elif size < end:
            problems.append(f"{file}: truncated, {size} bytes of {end}")
    return problems
