"""Devices, process groups, and Megatron-Core on machines without a GPU.

Importing this package prepares the process for `import megatron.core`: every package that imports
Megatron-Core imports this one first, in its own `__init__`.
"""

from gspo_megatron.platform.quiet import quiet_imports

with quiet_imports():
    from gspo_megatron.platform.cpu import needed as megatron_cpu

    megatron_cpu.install()
    from gspo_megatron.platform import megatron_fixes

    megatron_fixes.install()

__all__ = ["megatron_cpu", "megatron_fixes"]
