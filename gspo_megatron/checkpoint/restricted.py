"""The index of a torch_dist folder, read without trusting it.

torch.distributed.checkpoint writes `.metadata` as a pickle, and reading a pickle runs what it
names. Here it may name only the plain records that such an index is made of, and what it says is
held against the folder before anything is read.
"""

from __future__ import annotations

import enum
import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties

from gspo_megatron.checkpoint.index_rules import INDEX, check_index, read_pickle
from gspo_megatron.errors import DataError

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


def _member(cls: Any, name: Any) -> enum.Enum:
    """In the place of `getattr`, by which some Pythons pickle members of enums: 3.11.2, Debian
    12's, and its neighbours."""
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

    Raises DataError where the folder or its index is missing, damaged or foreign, or where a file
    that it names is missing or shorter than it says.
    """
    data = read_pickle(folder)
    try:
        index = _Unpickler(io.BytesIO(data)).load()
    except Exception as error:  # noqa: BLE001 (a damaged pickle raises just about anything)
        raise DataError(f"{folder / INDEX}: not an index of a checkpoint: {error}") from None
    check_index(index, folder)
    return index
