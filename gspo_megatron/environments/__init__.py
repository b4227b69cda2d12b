"""Environments, in which the policy takes several turns.

Importing this package registers the built-in environments. The names below are stable
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
