"""Engines that sample responses: the sharded training model itself, or one outside."""

import gspo_megatron.platform  # noqa: F401  (prepares the process for megatron.core)
