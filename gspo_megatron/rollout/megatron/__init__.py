"""Rollouts by the training model itself, on its own shards."""

import gspo_megatron.platform  # noqa: F401  (prepares the process for megatron.core)
