"""How a tensor of Megatron-Core's is put together from tensors of a Hugging Face model.

A recipe is a set of boxes: each is a block of one HF tensor and the place of its first element in
the Megatron tensor. The boxes of a recipe do not overlap; where there is none, the Megatron tensor
is padding. Any slice of either side is a matter of cutting boxes, so a shard is read or sent
without what lies beside it, and both directions come from one description. Bits are moved, never
computed with.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

Slices = tuple[slice, ...]

MOST_ELEMENTS = 2**24  # read at once


@dataclass(frozen=True)
class Box:
    """Elements [source, source + size) of the HF tensor `name` at [target, target + size) of ours.

    An HF tensor may have fewer dimensions than ours: its dimensions are our last ones, and the size
    along the others is 1.
    """

    name: str
    source: tuple[int, ...]
    target: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def source_slices(self) -> Slices:
        size = self.size[len(self.size) - len(self.source) :]
        return tuple(slice(at, at + n) for at, n in zip(self.source, size, strict=True))

    @property
    def target_slices(self) -> Slices:
        return tuple(slice(at, at + n) for at, n in zip(self.target, self.size, strict=True))

    @property
    def numel(self) -> int:
        return math.prod(self.size)

    def cut(self, slices: Sequence[slice]) -> Box | None:
        """The part within `slices` of our tensor, its target counted from their beginning."""
        starts, sizes, shifts = [], [], []
        for at, n, part in zip(self.target, self.size, slices, strict=True):
            first, last = max(at, part.start), min(at + n, part.stop)
            if first >= last:
                return None
            starts.append(first - part.start)
            sizes.append(last - first)
            shifts.append(first - at)
        shifts = shifts[len(shifts) - len(self.source) :]
        source = tuple(at + shift for at, shift in zip(self.source, shifts, strict=True))
        return Box(self.name, source, tuple(starts), tuple(sizes))


@dataclass(frozen=True)
class Recipe:
    """A Megatron tensor of `shape` made of HF tensors."""

    shape: tuple[int, ...]
    boxes: tuple[Box, ...]

    def cut(self, slices: Sequence[slice]) -> Iterator[Box]:
        """What a slice of the tensor is made of; targets are counted from its beginning. It may
        reach beyond the tensor, into padding."""
        for box in self.boxes:
            part = box.cut(slices)
            if part is not None:
                yield part


def copy(name: str, *shape: int) -> Recipe:
    """An HF tensor as it is."""
    zeros = (0,) * len(shape)
    return Recipe(tuple(shape), (Box(name, zeros, zeros, tuple(shape)),))


def concatenate(recipes: Sequence[Recipe]) -> Recipe:
    """One under the other along the first dimension."""
    boxes: list[Box] = []
    rows = 0
    for recipe in recipes:
        assert recipe.shape[1:] == recipes[0].shape[1:], "rows of different widths"
        boxes += (_moved(box, rows) for box in recipe.boxes)
        rows += recipe.shape[0]
    return Recipe((rows, *recipes[0].shape[1:]), tuple(boxes))


def interleave(recipes: Sequence[Recipe], groups: int) -> Recipe:
    """Each cut into `groups` along the first dimension; then the first groups of all, the second
    groups of all, ..."""
    chunks = []
    for group, recipe in itertools.product(range(groups), recipes):
        rows, rest = divmod(recipe.shape[0], groups)
        assert not rest, "groups of unequal size"
        chunks.append(rows_of(recipe, group * rows, rows))
    return concatenate(chunks)


def rows_of(recipe: Recipe, first: int, count: int) -> Recipe:
    """Rows [first, first + count)."""
    slices = (slice(first, first + count), *(slice(0, n) for n in recipe.shape[1:]))
    return Recipe((count, *recipe.shape[1:]), tuple(recipe.cut(slices)))


def stack(recipes: Sequence[Recipe]) -> Recipe:
    """Along a new first dimension."""
    boxes: list[Box] = []
    for index, recipe in enumerate(recipes):
        assert recipe.shape == recipes[0].shape, "layers of different shapes"
        boxes += (
            replace(box, target=(index, *box.target), size=(1, *box.size)) for box in recipe.boxes
        )
    return Recipe((len(recipes), *recipes[0].shape), tuple(boxes))


def flatten(recipe: Recipe) -> Recipe:
    """The first two dimensions as one, where each box lies within one index of the first."""
    outer, inner, *rest = recipe.shape
    boxes = []
    for box in recipe.boxes:
        assert box.size[0] == 1, "a box over several layers of a stack"
        target = (box.target[0] * inner + box.target[1], *box.target[2:])
        boxes.append(replace(box, target=target, size=box.size[1:]))
    return Recipe((outer * inner, *rest), tuple(boxes))


def _moved(box: Box, rows: int) -> Box:
    return replace(box, target=(box.target[0] + rows, *box.target[1:]))


Read = Callable[[str, Slices], "Tensor"]


def fill(out: Tensor, recipe: Recipe, slices: Sequence[slice], read: Read) -> None:
    """Fill `out` with a slice of a Megatron tensor, its padding with zeros.

    read(name, slices) gives the part of an HF tensor, of any dtype and device; it is asked for what
    the slice needs and nothing beside it.
    """
    boxes = list(recipe.cut(slices))
    if sum(box.numel for box in boxes) < out.numel():
        out.zero_()
    for box in boxes:
        for block in split(box, MOST_ELEMENTS):
            part = read(block.name, block.source_slices)
            out[block.target_slices].copy_(part.view(block.size))


def split(box: Box, most: int) -> Iterator[Box]:
    """A box as boxes of some of its rows, each of at most so many elements where a row has no more,
    so that what is read at once stays small."""
    axis = len(box.size) - len(box.source)
    rows = box.size[axis]
    step = max(1, most * rows // max(1, box.numel))
    for first in range(0, rows, step):
        size = (*box.size[:axis], min(step, rows - first), *box.size[axis + 1 :])
        target = (*box.target[:axis], box.target[axis] + first, *box.target[axis + 1 :])
        yield Box(box.name, (box.source[0] + first, *box.source[1:]), target, size)


def gather(out: Tensor, parts: Iterable[tuple[Box, Tensor]]) -> None:
    """The other direction: fill `out`, an HF tensor, from slices of Megatron tensors: for each box
    the data that its targets are counted from."""
    for box, data in parts:
        part = data[box.target_slices]
        out[box.source_slices].copy_(part.reshape(box.size[len(box.size) - len(box.source) :]))
