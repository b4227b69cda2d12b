"""Reward functions. One file a reward; importing the package registers those below."""

from gspo_megatron.rewards import code, exact, llm_judge, math, toy  # noqa: F401
