"""Stock GPTModel and MoE layers of Megatron-Core, built from a config on two layer backends."""

import gspo_megatron.platform  # noqa: F401  (prepares the process for megatron.core)
