"""Memory, communication and pipeline bubble of any layout, before a run.

The training code itself builds and runs a rank's part of the model on the meta device, over fake
process groups (platform.megatron_meta): there are no formulas of layers.
"""

import gspo_megatron.platform  # noqa: F401  (prepares the process for megatron.core)
