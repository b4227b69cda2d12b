"""Policy objectives: pure functions from LossInputs to LossOutputs, registered by name.

A new objective is a new module in this folder that uses `register`; nothing else has to change.
"""

from __future__ import annotations

import importlib
import pkgutil

from gspo_megatron.objectives.registry import Objective, get_objective, objective_names, register

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["Objective", "get_objective", "objective_names", "register"]
