"""What a run will need, before it runs: memory, communication and bubble of any layout.

The rank's part of the model is built and run by the training code itself, on the meta device and
over pretended process groups (platform.megatron_meta); nothing here knows a layer's formula.
"""

import gspo_megatron.platform  # noqa: F401  (prepares the process for megatron.core)
