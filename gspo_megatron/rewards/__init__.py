"""Reward functions. One file a reward; importing the package registers those below."""

from gspo_megatron.rewards import exact, math, toy
from gspo_megatron.rewards.registry import (
    Reward,
    check_answers,
    get_reward,
    name_of,
    register,
    reward_names,
    score,
)
from gspo_megatron.rewards.shaping import Shaping

__all__ = [
    "Reward",
    "Shaping",
    "check_answers",
    "exact",
    "get_reward",
    "math",
    "name_of",
    "register",
    "reward_names",
    "score",
    "toy",
]
