"""Reinforcement learning: one step is `loop.py`, the rest is what it calls."""

import gspo_megatron.platform  # noqa: F401  (prepares the process for megatron.core)
