"""Environments: what a policy acts in, and what the reward function sees of it. One file an
environment; importing the package registers those below."""

from gspo_megatron.environments import agent, tool_use  # noqa: F401
