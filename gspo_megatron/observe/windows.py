"""Means over windows of steps."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

SMALLEST_WINDOW = 5  # average at least this many steps: rewards are noisy


def window(steps: int) -> int:
    """Return how many steps are averaged in a run of `steps`: a tenth of all, but at least 5."""
    return max(SMALLEST_WINDOW, math.ceil(steps / 10))


def window_means(values: Sequence[float], size: int) -> list[float]:
    """Return the mean of the finite values in each window of `size` values; NaN for a window
    without finite values. With `size` 1, return the values unchanged."""
    if size == 1:
        return list(values)
    if len(values) < size:
        return []
    array = np.array(values, dtype=float)
    is_finite = np.isfinite(array)
    totals, counts = (_sums(each, size) for each in (np.where(is_finite, array, 0.0), is_finite))
    return np.where(counts > 0, totals / np.maximum(counts, 1), math.nan).tolist()


def _sums(values: np.ndarray, size: int) -> np.ndarray:
    """Return the sum of each window of `size` values.

    Only the values of a window are added. In differences of running sums over the whole curve, one
    very large value would make the sums of all later windows wrong. So the curve is cut into blocks
    of `size`: a window is the end of a block and the beginning of the next one."""
    blocks = -(-len(values) // size)
    table = np.zeros((blocks, size))
    table.ravel()[: len(values)] = values
    beginnings = table.cumsum(axis=1).ravel()
    ends = table[:, ::-1].cumsum(axis=1)[:, ::-1].ravel()
    first = np.arange(len(values) - size + 1)
    return ends[first] + np.where(first % size, beginnings[first + size - 1], 0.0)
