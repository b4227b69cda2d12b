"""Verifies on the user's machine that gradients are the same on every layout."""

import gspo_megatron.platform  # noqa: F401  (prepares the process for megatron.core)
