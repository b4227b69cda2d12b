"""The same gradients on every layout, on the user's machine."""

import gspo_megatron.platform  # noqa: F401  (prepares the process for megatron.core)
