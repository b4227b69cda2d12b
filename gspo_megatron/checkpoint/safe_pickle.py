"""Reads the index of a torch_dist folder safely.

torch.distributed.checkpoint writes `.metadata` as a pickle, which can run any code when it is read.
Here it may name only the plain records of an index, which is then checked against the files.
"""

from __future__ import annotations

import enum
import io
import math
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata

from gspo_megatron.errors import DataError

INDEX = ".metadata"
# What a pickle may name, by module; dtypes of torch besides.
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
    """Newer versions of torch append fields that older versions do not know."""

    def __setstate__(self, state: tuple) -> None:
        try:
            super().__setstate__(state)
        except ValueError:
            super().__setstate__(state[:5])


def _member(cls: Any, name: Any) -> enum.Enum:
    """Replaces `getattr`, with which some Pythons pickle members of enums (Debian 12's 3.11.2)."""
    if not (isinstance(cls, enum.EnumMeta) and name in cls.__members__):
        raise pickle.UnpicklingError("it takes an attribute, which no checkpoint needs")
    member: enum.Enum = cls[name]
    return member


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        if name == TensorProperties.__name__:
            return _Properties
        if name in _RECORDS.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(value := getattr(torch, name, None), torch.dtype):
            return value
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")


def read_index(folder: Path) -> Metadata:
    """The index of a folder in Megatron-Core's torch_dist format.

    Raises DataError, with all that is wrong, where the index is missing, damaged or foreign, where
    blocks of a tensor are missing, or where a file that the index names is missing or too short.
    """
    path = folder / INDEX
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; is this the folder of a checkpoint?") from None
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None
    try:
        index = _Unpickler(io.BytesIO(data)).load()
        if not isinstance(index, Metadata):
            raise ValueError(f"it is a {type(index).__name__}")
        problems = _problems(index, folder)
    except Exception as error:  # noqa: BLE001 (a damaged pickle raises just about anything)
        raise DataError(f"{path}: not an index of a checkpoint: {error}") from None
    if problems:
        raise DataError("\n".join(problems))
    return index


def _problems(index: Metadata, folder: Path) -> list[str]:
    path = folder / INDEX
    ends: dict[str, int] = {}  # bytes that each file must have
    places = set()
    for place, info in index.storage_data.items():
        name = info.relative_path
        transformed = getattr(info, "transform_descriptors", None)
        if not isinstance(name, str) or Path(name).name != name or transformed:
            return [f"{path}: names {name!r}, which is not a file of this folder"]
        ends[name] = max(ends.get(name, 0), info.offset + info.length)
        places.add((place.fqn, getattr(place, "offset", None)))
    problems = []
    for key, entry in index.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            continue
        stored = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
        offsets = {chunk.offsets for chunk in entry.chunks}
        found = all((key, offset) in places for offset in offsets)
        axes = {len(sizes) for chunk in entry.chunks for sizes in (chunk.offsets, chunk.sizes)}
        whole = found and stored == math.prod(entry.size) and axes == {len(entry.size)}
        if not whole or len(offsets) != len(entry.chunks):
            problems.append(f"{path}: {key} is not whole: {stored} of {math.prod(entry.size)}")
    for name, end in sorted(ends.items()):
        file = folder / name
        size = file.stat().st_size if file.is_file() else None
        if size is None:
            problems.append(f"{file}: no such file")
        elif size < end:
            problems.append(f"{file}: truncated, {size} bytes of {end}")
    return problems
