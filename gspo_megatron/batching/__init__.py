"""Sequences become the micro-batches of each rank."""

import gspo_megatron.platform  # noqa: F401  (prepares the process for megatron.core)
