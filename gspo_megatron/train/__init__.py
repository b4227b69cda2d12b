"""The training loop: supervised warm start and RL steps on Megatron-Core's schedules."""

import gspo_megatron.platform  # noqa: F401  (prepares the process for megatron.core)
