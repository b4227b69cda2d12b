"""Blocks of tensors on their way between the two layouts, without looking at all of either."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import product, zip_longest
from typing import Generic, TypeVar

from gspo_megatron.checkpoint.hf.files_header import TensorSpec, tensor_bytes, torch_dtype
from gspo_megatron.checkpoint.hf.pieces import Box, Recipe, Slices, split

BLOCK_BYTES = 8 << 20  # of a tensor, moved at once

Item = TypeVar("Item")


class RowIndex(Generic[Item]):
    """Items that each take rows [first, first + count) of one tensor; they may overlap."""

    def __init__(self, items: Iterable[tuple[int, int, Item]]) -> None:
        found = sorted(items, key=lambda entry: entry[0])
        self._firsts = [first for first, _, _ in found]
        self._items = [item for _, _, item in found]
        self._tallest = max((count for _, count, _ in found), default=0)

    def near(self, first: int, count: int) -> list[Item]:
        """All items that touch these rows, and maybe some that do not."""
        begin = bisect_left(self._firsts, first - self._tallest + 1)
        return self._items[begin : bisect_left(self._firsts, first + count)]


def blocks(spec: TensorSpec) -> Iterator[Slices]:
    """A tensor cut into blocks of at most BLOCK_BYTES, of whole rows where that is possible."""
    size, whole = spec.item_bytes, 0
    for dimension in reversed(range(len(spec.shape))):  # from here on dimensions stay whole
        if size * spec.shape[dimension] > BLOCK_BYTES:
            whole = dimension + 1
            break
        size *= spec.shape[dimension]
    ranges = []
    for dimension, extent in enumerate(spec.shape[:whole]):
        step = max(1, BLOCK_BYTES // size) if dimension == whole - 1 else 1
        ranges.append([slice(at, min(at + step, extent)) for at in range(0, extent, step)])
    rest = tuple(slice(0, extent) for extent in spec.shape[whole:])
    for leading in product(*ranges):
        yield (*leading, *rest)


Piece = tuple[str, Box]  # of the Megatron tensor of that key, and of one HF tensor


def pieces_of(recipes: Mapping[str, Recipe], source: Mapping[str, TensorSpec]) -> list[Piece]:
    """All of a model in pieces of at most BLOCK_BYTES, a row at least, each once."""
    return [
        (key, piece)
        for key, recipe in recipes.items()
        for box in recipe.boxes
        for piece in split(box, BLOCK_BYTES // source[box.name].item_bytes)
    ]


def in_turns(pieces: Iterable[Piece], group: Callable[[Piece], str]) -> list[Piece]:
    """One piece of each group, then the next of each: neighbours have no file in common."""
    groups: dict[str, list[Piece]] = {}
    for piece in pieces:
        groups.setdefault(group(piece), []).append(piece)
    turns = zip_longest(*groups.values())
    return [piece for turn in turns for piece in turn if piece is not None]


class _Workspace(threading.local):
    """Memory that a thread uses again and again: what the system hands out fresh costs more time
    than what is done with it."""

    def __init__(self) -> None:
        self._buffers: dict[str, bytearray] = {}

    def bytes(self, use: str, size: int) -> memoryview:
        """So many bytes, until the next call for the same `use` in this thread."""
        if len(self._buffers.get(use, b"")) < size:
            self._buffers[use] = bytearray(size)
        return memoryview(self._buffers[use])[:size]


workspace = _Workspace()


def as_dtype(data: memoryview, before: str, after: str) -> memoryview:
    """Elements of one dtype as those of another, rounded as torch does it."""
    if before == after:
        return data
    import torch

    torch.set_num_threads(1)  # the work is shared by threads already
    tensor = torch.frombuffer(data, dtype=torch_dtype(before))
    return tensor_bytes(tensor.to(torch_dtype(after)))
