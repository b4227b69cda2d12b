"""Estimates memory, communication and pipeline bubble of any layout before a run.

For that, the training code builds a rank's part of the model on the meta device
(platform.megatron_meta), and runs it."""

import gspo_megatron.platform  # noqa: F401  (prepares the process for megatron.core)
