"""Blocks of tensors on their way between the two layouts, without looking at all of either."""

from __future__ import annotations

import math
import threading
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from gspo_megatron.checkpoint.hf.files_header import TensorSpec
from gspo_megatron.checkpoint.hf.pieces import Box, Recipe, Slices

BLOCK_BYTES = 8 << 20  # of a tensor, made and written at once

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
    size, whole = spec.dtype.itemsize, 0
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


class _Workspace(threading.local):
    """Memory that a thread uses again and again: what the system hands out fresh costs more time
    than what is done with it."""

    def __init__(self) -> None:
        self._buffers: dict[str, bytearray] = {}

    def empty(self, use: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor of this thread with a storage of its size; the next one for the same `use` takes
        its place."""
        size = math.prod(shape) * dtype.itemsize
        if size == 0:
            return torch.empty(tuple(shape), dtype=dtype)
        if len(self._buffers.get(use, b"")) < size:
            self._buffers[use] = bytearray(size)
        count = size // dtype.itemsize
        return torch.frombuffer(self._buffers[use], dtype=dtype, count=count).view(tuple(shape))


workspace = _Workspace()


class Store(Protocol):
    """Tensors in files, of which any part can be had."""

    @property
    def tensors(self) -> Mapping[str, TensorSpec]: ...

    def read_into(self, name: str, slices: Slices, out: Tensor) -> None: ...


class Filling:
    """Blocks of Megatron tensors out of a store of HF tensors."""

    def __init__(self, recipes: Mapping[str, Recipe], store: Store) -> None:
        self._store = store
        self._boxes = {
            key: RowIndex((box.target[0], box.size[0], box) for box in recipe.boxes)
            for key, recipe in recipes.items()
        }

    def read_into(self, key: str, slices: Slices, out: Tensor) -> None:
        """Fill a contiguous tensor, of any dtype, with that part of one."""
        near = self._boxes[key].near(slices[0].start, slices[0].stop - slices[0].start)
        boxes = [part for box in near if (part := box.cut(slices)) is not None]
        assert sum(box.numel for box in boxes) == out.numel(), f"{key}: not made up"
        for box in boxes:
            size = box.size[len(box.size) - len(box.source) :]
            _read(self._store, box.name, box.source_slices, size, out[box.target_slices])


class Parts:
    """Blocks of HF tensors out of a store of Megatron tensors."""

    def __init__(self, recipes: Mapping[str, Recipe], store: Store) -> None:
        self._store = store
        self._boxes: dict[str, list[tuple[str, Box]]] = {}
        for key, recipe in recipes.items():
            for box in recipe.boxes:
                self._boxes.setdefault(box.name, []).append((key, box))

    def key(self, name: str) -> str:
        """The Megatron tensor that an HF tensor is in: all of them, at least its beginning."""
        return self._boxes[name][0][0]

    def read_into(self, name: str, slices: Slices, out: Tensor) -> None:
        """Fill a contiguous tensor, of any dtype, with that part of one."""
        filled = 0
        for key, box in self._boxes[name]:
            found = _cut_source(box, slices)
            if found is None:
                continue
            wanted, place = found
            target = out[place]
            size = [part.stop - part.start for part in wanted]
            _read(self._store, key, wanted, size, target)
            filled += target.numel()
        assert filled == out.numel(), f"{name}: not made up"


def _read(store: Store, name: str, slices: Slices, size: Sequence[int], out: Tensor) -> None:
    """A part of that size into a view with as many elements, straight if it can be."""
    dtype = store.tensors[name].dtype
    if out.is_contiguous() and out.dtype == dtype:
        store.read_into(name, slices, out.view(tuple(size)))
        return
    part = workspace.empty("part", size, dtype)
    store.read_into(name, slices, part)
    out.copy_(part.view(out.shape))


def _cut_source(box: Box, slices: Slices) -> tuple[Slices, Slices] | None:
    """Of a part of an HF tensor, what the box has: the slices of the Megatron tensor, and the place
    in the part."""
    own = list(box.target_slices)
    place = []
    outer = len(box.size) - len(box.source)
    for dimension, (at, part) in enumerate(zip(box.source, slices, strict=True), start=outer):
        first = max(at, part.start)
        last = min(at + box.size[dimension], part.stop)
        if first >= last:
            return None
        shift = box.target[dimension] - at
        own[dimension] = slice(first + shift, last + shift)
        place.append(slice(first - part.start, last - part.start))
    return tuple(own), tuple(place)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Not by value: a NaN differs from itself, and 0.0 does not from -0.0."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[one.dtype.itemsize]
    return torch.equal(one.view(integers), other.view(integers))
