"""Confidence intervals of means and shares."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

CONFIDENCE = 0.95
RESAMPLES = 10_000
_RESAMPLED_AT_ONCE = 10_000_000  # numbers in memory at a time


def bootstrap_interval(of_problems: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """Return the 95% bootstrap percentile interval of the mean over problems.

    The interval says how far another choice of problems could move the mean. If there is one
    problem, or all have the same value, both bounds are this value."""
    values = np.asarray(of_problems, dtype=np.float64)
    if len(values) < 2 or (values == values[0]).all():
        return float(values[0]), float(values[0])
    from scipy import stats  # this import takes 20% of a rank's start, and most runs never need it

    result = stats.bootstrap(
        (values,),
        np.mean,
        confidence_level=CONFIDENCE,
        n_resamples=RESAMPLES,
        batch=max(1, _RESAMPLED_AT_ONCE // len(values)),
        method="percentile",
        random_state=np.random.default_rng(seed),
    )
    return float(result.confidence_interval.low), float(result.confidence_interval.high)


def share_interval(share: float, count: int) -> tuple[float, float]:
    """Return the 95% interval (Wilson's score) of a share of `count` independent trials.

    The interval is wider than 0 even if all trials were right or all were wrong. Raises ValueError
    if count < 1."""
    if count < 1:
        raise ValueError(f"an interval of {count} trials")
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    shrunk = (share + z * z / (2 * count)) / (1 + z * z / count)
    spread = share * (1 - share) / count + z * z / (4 * count * count)
    half = z * math.sqrt(max(0.0, spread)) / (1 + z * z / count)
    return max(0.0, shrunk - half), min(1.0, shrunk + half)
