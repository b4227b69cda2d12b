"""Pre-training and supervised fine-tuning."""

import gspo_megatron.platform  # noqa: F401  (prepares the process for megatron.core)
