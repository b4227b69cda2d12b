"""Reward functions. One file a reward; importing the package registers those below."""

from gspo_megatron.rewards import exact, math, toy
from gspo_megatron.rewards.registry import Reward, get_reward, register, reward_names, score

__all__ = ["Reward", "exact", "get_reward", "math", "register", "reward_names", "score", "toy"]
