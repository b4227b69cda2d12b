"""Builds the micro-batches of each rank from the sequences of a step."""

import gspo_megatron.platform  # noqa: F401  (prepares the process for megatron.core)
