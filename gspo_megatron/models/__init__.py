"""Builds Megatron-Core's stock GPTModel and MoE layers from a configuration, on either layer
backend."""

import gspo_megatron.platform  # noqa: F401  (prepares the process for megatron.core)
