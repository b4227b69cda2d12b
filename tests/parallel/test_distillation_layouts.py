"""On-policy distillation: the same update on every layout."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from gspo_megatron.models.build import Policy
from gspo_megatron.rl import policy_update
from gspo_megatron.verify.parity import run_update
from gspo_megatron.verify.results import StepResult, compare
from tests.parallel.models import NO_ROUTER_LOSSES, odd_moe
from tests.parallel.pool import Pool
from tests.parallel.updates import FP64_TOLERANCE, DistantReference, assert_same_update, update


def distant_teacher(folder: str, policy: Policy, *, offload: bool) -> DistantReference:
    """In place of a folder's weights: a function of the policy's, the same on every layout."""
    return DistantReference(policy, offload=offload)


@mock.patch.object(policy_update, "teacher_of", distant_teacher)
def update_with_a_teacher(**arguments: Any) -> StepResult:
    return run_update(**arguments)


@pytest.mark.parametrize("name", ["gspo", "gspo_token", "dapo"])
def test_update_is_that_of_one_rank_and_differs_from_the_plain_one(pool: Pool, name: str) -> None:
    def run(layout: str, section: dict[str, Any]) -> StepResult:
        config = odd_moe(layout, section, training={"precision": "fp64"}, **NO_ROUTER_LOSSES)
        return update(pool, config, update_with_a_teacher)

    section = {"name": name, "distillation": {"teacher": "a folder", "coefficient": 0.5}}
    alone = run("tp=1", section)
    distances = compare(run("tp=1", {"name": name}).gradients, alone.gradients)
    assert distances[0][1] > 1e-5, "the teacher says nothing"
    for layout in ("dp=2", "tp=2,cp=2", "pp=2,vpp=2,ep=2"):
        assert_same_update(run(layout, section), alone, FP64_TOLERANCE)
