"""Reinforcement learning: `loop.py` is one step; the other modules are its parts."""

import gspo_megatron.platform  # noqa: F401  (prepares the process for megatron.core)
