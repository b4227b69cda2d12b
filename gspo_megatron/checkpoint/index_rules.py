"""What the index of a torch_dist folder must be like before anything is read by it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from gspo_megatron.errors import DataError

INDEX = ".metadata"


def check_index(index: Any, folder: Path) -> None:
    """`index` is torch's record of it, or one with the same attributes.

    Raises DataError, with all that is wrong, where it is something else, where the blocks of a
    tensor do not make up all of it, and where a file that it names is missing or shorter than it
    says.
    """
    try:
        problems = _problems(index, folder)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        problems = [f"{folder / INDEX}: not an index of a checkpoint: {error}"]
    if problems:
        raise DataError("\n".join(problems))


def read_pickle(folder: Path) -> bytes:
    """The index as it is. Raises DataError where there is none to read."""
    path = folder / INDEX
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; is this the folder of a checkpoint?") from None
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None


def _problems(index: Any, folder: Path) -> list[str]:
    path = folder / INDEX
    if type(index).__name__ != "Metadata":
        return [f"{path}: not an index of a checkpoint, but a {type(index).__name__}"]
    ends: dict[str, int] = {}
    problems = []
    places = set()
    for place, info in index.storage_data.items():
        name = info.relative_path
        transformed = getattr(info, "transform_descriptors", None)
        if not isinstance(name, str) or Path(name).name != name or transformed:
            return [f"{path}: names {name!r}, which is not a file of this folder"]
        ends[name] = max(ends.get(name, 0), info.offset + info.length)
        places.add((place.fqn, getattr(place, "offset", None)))
    for key, entry in index.state_dict_metadata.items():
        if not hasattr(entry, "chunks"):
            continue  # not a tensor
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
