"""The in-process rollout engine: the training model generates on its own shards."""

import gspo_megatron.platform  # noqa: F401  (prepares the process for megatron.core)
