"""Policy objectives: pure functions from LossInputs to LossOutputs, made of small parts.

gspo_megatron/config/objectives.py lists the parts and the numbers of each objective. The names
below are stable (docs/stability.md).
"""

from __future__ import annotations

from gspo_megatron.objectives.advantages import (
    batch_std,
    group_mean,
    group_mean_std,
    leave_one_out,
)
from gspo_megatron.objectives.losses import (
    Objective,
    aggregate_sequences,
    aggregate_tokens,
    build_objective,
    gspo,
)
from gspo_megatron.objectives.metrics import pair, policy_metrics, ratio_values
from gspo_megatron.objectives.parts import (
    exponentiate,
    min_clip,
    sequence_log_ratio,
    sequence_sums,
    token_log_ratio,
)

__all__ = [
    "Objective",
    "aggregate_sequences",
    "aggregate_tokens",
    "batch_std",
    "build_objective",
    "exponentiate",
    "group_mean",
    "group_mean_std",
    "gspo",
    "leave_one_out",
    "min_clip",
    "pair",
    "policy_metrics",
    "ratio_values",
    "sequence_log_ratio",
    "sequence_sums",
    "token_log_ratio",
]
