"""The reward of one sample, in a form that a test can compare."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gspo_megatron.config.schema import RewardSection
from gspo_megatron.rewards.registry import Reward
from gspo_megatron.rewards.scoring import Scorer
from gspo_megatron.types import Sample, TurnRewards


def score(reward: Callable[[Sample], Any], sample: Sample) -> float | TurnRewards:
    """The score that a reward gives a sample. The reward may be a plain function."""
    reward = reward if isinstance(reward, Reward) else Reward("mine", reward)
    ((found,), _) = Scorer(reward, RewardSection(retries=0, workers=0)).score([sample])
    if found.ends is not None:
        return TurnRewards(found.rewards, found.ends)
    (number,) = found.rewards.tolist()
    return number
