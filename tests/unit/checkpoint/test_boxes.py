"""Runs of a flattened tensor as boxes."""

from __future__ import annotations

import math

import pytest
import torch

from gspo_megatron.checkpoint.model_pieces import boxes


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (1, 4), (4, 1), (3, 2, 4), (2, 1, 3, 2)])
def test_every_run_in_order(shape: tuple[int, ...]) -> None:
    """All runs of all these shapes: the boxes hold the run's elements, in its order."""
    count = math.prod(shape)
    whole = torch.arange(count).view(shape)
    for start in range(count + 1):
        for stop in range(start, count + 1):
            found = list(boxes(shape, start, stop))
            elements = []
            for offset, size in found:
                assert len(offset) == len(size) == len(shape) and 0 not in size
                box = whole[tuple(slice(o, o + n) for o, n in zip(offset, size))]
                assert box.shape == size
                elements += box.flatten().tolist()
            assert elements == list(range(start, stop))
            assert len(found) <= max(1, 2 * len(shape) - 1)


def test_a_backward_run_is_empty() -> None:
    assert list(boxes((3, 4), 7, 5)) == []
