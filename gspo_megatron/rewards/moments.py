"""Mean and standard deviation of a reward model's scores over a run."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


class RunningMoments:
    """The mean and standard deviation of all scores so far. They are computed from a dictionary,
    which a checkpoint saves.

    All numbers are 64-bit floats and are added in a fixed order, so a resumed run has the same
    values, bit for bit.
    """

    def __init__(self, kept: dict[str, float]) -> None:
        """kept: the dictionary, which is changed in place; an empty one means that there are no
        scores yet. Its keys are count, mean, and squares (the sum of the squared differences from
        the mean)."""
        self.kept = kept

    @property
    def count(self) -> float:
        return self.kept.get("count", 0.0)

    @property
    def mean(self) -> float:
        """The mean; 0 without scores."""
        return self.kept.get("mean", 0.0)

    @property
    def std(self) -> float:
        """The population's standard deviation; 0 without scores."""
        return math.sqrt(self.kept["squares"] / self.count) if self.count else 0.0

    def add(self, scores: Sequence[float] | np.ndarray) -> None:
        """Add scores, with Chan's formula for joining two sets. The order of the scores must be the
        same on every layout."""
        values = np.asarray(scores, np.float64)
        if not len(values):
            return
        added, before = float(len(values)), self.count
        mean = math.fsum(values) / added
        squares = math.fsum((values - mean) ** 2)
        difference, count = mean - self.mean, before + added
        squares += self.kept.get("squares", 0.0) + difference**2 * before * added / count
        self.kept.update(count=count, mean=self.mean + difference * added / count, squares=squares)

    def normalize(self, scores: np.ndarray) -> np.ndarray:
        """Return the scores minus the mean, divided by the standard deviation; zeros if the
        standard deviation is not larger than rounding errors."""
        std = self.std
        if std <= abs(self.mean) * np.finfo(np.float32).eps:
            return np.where(np.isnan(scores), np.nan, 0.0)
        return (scores - self.mean) / std
