"""What the ranks do in test_regularisation_layouts and test_attention_kinds."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch

from gspo_megatron.checkpoint.start import load_initial_weights
from gspo_megatron.config import Config
from gspo_megatron.models.build import Policy
from gspo_megatron.models.reference import ReferencePolicy
from gspo_megatron.rl import policy_update as step
from gspo_megatron.verify import parity
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


def update_from_folder(**arguments: Any) -> StepResult:
    """`run_update` with the weights of model.hf_path, and all else that its config.json gives."""
    native = parity.build_policy

    def build_policy(config: Config, *others: Any) -> Policy:
        policy = native(config, *others)
        load_initial_weights(config, policy)
        return policy

    with mock.patch.object(parity, "build_policy", build_policy):
        return run_update(**arguments)
