"""What a configuration makes of a reward before it is trained on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gspo_megatron.config.schema import RewardSection
from gspo_megatron.types import Sample


@dataclass(frozen=True)
class Shaping:
    """Rewards are scaled, then clipped, and lose at last what an overlong response costs."""

    section: RewardSection
    max_response_tokens: int

    @property
    def is_on(self) -> bool:
        """Whether any reward can come out another."""
        section = self.section
        return section.scale != 1.0 or section.clip is not None or self._has_buffer

    @property
    def _has_buffer(self) -> bool:
        return self.section.overlong_buffer is not None

    def __call__(self, rewards: np.ndarray, sample: Sample) -> np.ndarray:
        """`rewards` [turns] float64 of one response, or [1] of all of it; likewise the result.

        Turns are scaled and clipped one by one. The last one pays for an overlong response: its
        tokens are the ones too many.
        """
        rewards = rewards * self.section.scale
        if self.section.clip is not None:
            rewards = rewards.clip(-self.section.clip, self.section.clip)
        if self._has_buffer:
            rewards[-1] -= self.overlong_cost(sample.num_tokens, sample.truncated)
        return rewards

    def overlong_cost(self, num_tokens: int, truncated: bool) -> float:
        """Soft overlong punishment (DAPO, arXiv 2503.14476, eq. 13), as what is taken off.

        Nothing up to `max_response_tokens - overlong_buffer` tokens; from there on a part of
        `overlong_penalty` that grows to all of it over the buffer. A truncated response has no end,
        and pays in full.
        """
        buffer = self.section.overlong_buffer
        assert buffer is not None
        excess = num_tokens - (self.max_response_tokens - buffer)
        share = 1.0 if truncated else min(max(excess / buffer, 0.0), 1.0)
        return self.section.overlong_penalty * share
