"""The reward `reward_model`: the reward is the score of `reward.model` and nothing else.

The score comes from rollout/reward_model.py (a server) or rl/reward_model.py (the training ranks).
With any other reward function, this score is one more part of the reward.
"""

from __future__ import annotations

from gspo_megatron.rewards.registry import register
from gspo_megatron.types import Sample


@register("reward_model", answers=None)
def reward_model(sample: Sample) -> float:
    """Return 0.0 for every response; the score of `reward.model` is added later."""
    return 0.0
