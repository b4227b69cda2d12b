"""What the ranks do in test_regularisation_layouts."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch

from gspo_megatron.models.reference import ReferencePolicy
from gspo_megatron.rl import policy_update as step
from gspo_megatron.verify.parity import run_update
from gspo_megatron.verify.results import StepResult


class DistantReference(ReferencePolicy):
    """The policy with every weight a little larger: at the start of RL the divergence from the
    reference would be zero, and its gradient with it."""

    @torch.no_grad()
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        for weight in self._weights:
            weight.mul_(1.05)


def update_away_from_the_reference(**arguments: Any) -> StepResult:
    """`run_update` with a reference that differs from the policy."""
    with mock.patch.object(step, "ReferencePolicy", DistantReference):
        return run_update(**arguments)
