"""Policy objectives: pure functions from LossInputs to LossOutputs, made of small parts.

Which parts make which objective, and their numbers: gspo_megatron/config/objectives.py.
"""

from __future__ import annotations

from gspo_megatron.objectives.losses import Objective, build_objective

__all__ = ["Objective", "build_objective"]
