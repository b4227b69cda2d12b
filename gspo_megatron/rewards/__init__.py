"""Reward functions. Each file has one reward; importing the package registers them. The names below
are stable (docs/stability.md)."""

from gspo_megatron.rewards import code, exact, llm_judge, math, reward_model, toy  # noqa: F401
from gspo_megatron.rewards.registry import Reward, get_reward, register

__all__ = ["Reward", "get_reward", "register"]
