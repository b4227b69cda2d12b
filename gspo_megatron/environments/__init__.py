"""Environments: what a policy acts in, and what the reward function sees of it. One file an
environment; importing the package registers those below. The names below are stable
(docs/stability.md)."""

from gspo_megatron.environments import agent, tool_use  # noqa: F401
from gspo_megatron.environments.episode import (
    Client,
    Environment,
    LimitReached,
    Trajectory,
    Turn,
)

__all__ = ["Client", "Environment", "LimitReached", "Trajectory", "Turn"]
