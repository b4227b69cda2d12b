"""Rollouts by the training model itself."""

import gspo_megatron.platform  # noqa: F401  (prepares the process for megatron.core)
