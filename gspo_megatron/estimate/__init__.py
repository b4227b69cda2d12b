"""Estimates memory, communication and pipeline bubble of any layout before a run.

The training code builds a rank's part of the model on the meta device (platform.megatron_meta) and
runs a micro-batch through it."""

import gspo_megatron.platform  # noqa: F401  (prepares the process for megatron.core)
