"""Reward shaping: scale, clip and the penalty of overlong responses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from gspo_megatron.config.schema import RewardSection
from gspo_megatron.types import Sample


@dataclass(frozen=True)
class Shaping:
    """Scales rewards, then clips them, then subtracts the penalty of an overlong response."""

    section: RewardSection
    max_response_tokens: int

    @property
    def is_on(self) -> bool:
        """Whether any reward can change."""
        section = self.section
        changes = section.scale != 1.0 or section.clip is not None
        return changes or section.overlong_buffer is not None

    def __call__(self, rewards: np.ndarray, sample: Sample) -> np.ndarray:
        """The shaped rewards of one response. `rewards` and the result: [turns] float64, or [1].

        Each turn is scaled and clipped. The penalty is the last turn's: its tokens exceed the
        length.
        """
        rewards = rewards * self.section.scale
        if self.section.clip is not None:
            rewards = rewards.clip(-self.section.clip, self.section.clip)
        if (buffer := self.section.overlong_buffer) is not None:
            # Soft overlong punishment (DAPO, arXiv 2503.14476, eq. 13): it is 0 up to
            # `max_response_tokens - overlong_buffer` tokens and grows over the buffer to
            # `overlong_penalty`, which is also that of a truncated response.
            excess = sample.num_tokens - (self.max_response_tokens - buffer)
            share = 1.0 if sample.truncated else min(max(excess / buffer, 0.0), 1.0)
            rewards[-1] -= self.section.overlong_penalty * share
        return rewards


# Parts that differ by float32 rounding alone have no spread, as in objectives/advantages.py.
_ROUNDING = 4 * float(np.finfo(np.float32).eps)


def sum_of_normalized_parts(
    parts: np.ndarray, groups: np.ndarray, std: Literal["sample", "population"]
) -> np.ndarray:
    """GDPO (arXiv 2601.05242): each part of a reward, weighted, minus its mean in the group and
    divided by its standard deviation there; then their sum.

    parts: [parts, num_sequences] float64, NaN in groups of failed calls; groups: [num_sequences];
    the result: [num_sequences] float64, NaN in these groups. A part without spread in a group adds
    exactly 0.
    """
    total = np.zeros(len(groups))
    for number in np.unique(groups):
        rows = groups == number
        own = parts[:, rows]
        differs = np.ptp(own, axis=1) > _ROUNDING * np.abs(own).max(axis=1)
        centred = own - own.mean(axis=1, keepdims=True)
        degrees = max(own.shape[1] - (std == "sample"), 1)
        deviation = np.sqrt(np.square(centred).sum(axis=1) / degrees)
        scaled = centred[differs] / deviation[differs, None]
        total[rows] = np.nan if np.isnan(own).any() else scaled.sum(axis=0)
    return total
