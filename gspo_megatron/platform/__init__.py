"""Devices, process groups, and Megatron-Core on machines without a GPU.

Importing this package prepares the process for `import megatron.core`: every package that imports
Megatron-Core imports this one first, in its own `__init__`.
"""

from gspo_megatron.platform.quiet import quiet_imports

with quiet_imports():
    from gspo_megatron.platform.cpu import faster, needed, products

    faster.prepare_torch()
    needed.install()
    faster.adapt_megatron()
    products.adapt_megatron()
    from gspo_megatron.platform import megatron_fixes

    megatron_fixes.install()

__all__ = ["megatron_fixes"]
