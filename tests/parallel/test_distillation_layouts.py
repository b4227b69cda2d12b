"""On-policy distillation: the same update on every layout, and that of the formulas."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from gspo_megatron.models.build import Policy
from gspo_megatron.rl import policy_update
from gspo_megatron.verify.parity import run_update
from gspo_megatron.verify.results import StepResult, compare
from tests.parallel.explicit_distillation import explicit_distillation
from tests.parallel.models import NO_ROUTER_LOSSES, odd_moe
from tests.parallel.pool import Pool
from tests.parallel.updates import (
    FP64_TOLERANCE,
    DistantReference,
    assert_same_gradients,
    assert_same_update,
    update,
)

FP64 = {"precision": "fp64"}
# advantages of whole sequences are float32, whatever the precision of the model
FP32_ADVANTAGES = 1e-6
WIDE = "tp=2,pp=2,cp=2,ep=2"


def distant_teacher(folder: str, policy: Policy, *, offload: bool) -> DistantReference:
    """In place of a folder's weights: a function of the policy's, the same on every layout."""
    return DistantReference(policy, offload=offload)


@mock.patch.object(policy_update, "teacher_of", distant_teacher)
def update_with_a_teacher(**arguments: Any) -> StepResult:
    return run_update(**arguments)


def run(pool: Pool, layout: str, section: dict[str, Any]) -> StepResult:
    config = odd_moe(layout, section, training=FP64, **NO_ROUTER_LOSSES)
    return update(pool, config, update_with_a_teacher)


def check(pool: Pool, name: str, layouts: tuple[str, ...], **distillation: Any) -> StepResult:
    """One rank's update is that of the formulas, and every layout's that of one rank."""
    distillation = {"teacher": "a folder", "coefficient": 0.5, **distillation}
    section = {"name": name, "distillation": distillation}
    alone = run(pool, "tp=1", section)
    plain = odd_moe("tp=1", section, training=FP64, **NO_ROUTER_LOSSES)
    formulas = update(pool, plain, explicit, teacher=DistantReference)
    of_sequences = name == "gspo" and "form" not in distillation
    tolerance = FP32_ADVANTAGES if of_sequences else FP64_TOLERANCE
    assert_same_gradients(alone, formulas, tolerance)
    assert alone.metrics["loss"] == pytest.approx(formulas.metrics["loss"], rel=tolerance)
    distances = compare(run(pool, "tp=1", {"name": name}).gradients, alone.gradients)
    assert distances[0][1] > 1e-5, "the teacher says nothing"
    for layout in layouts:
        assert_same_update(run(pool, layout, section), alone, FP64_TOLERANCE)
    return alone


def explicit(**arguments: Any) -> StepResult:
    arguments.pop("cut")
    return explicit_distillation(**arguments)


@pytest.mark.parametrize("name", ["gspo", "gspo_token", "grpo"])
def test_an_advantage_is_that_of_the_formula_on_every_layout(pool: Pool, name: str) -> None:
    check(pool, name, ("dp=2", "tp=2,cp=2", "pp=2,vpp=2,ep=2"))


@pytest.mark.parametrize(
    ("name", "form", "layouts"),
    [
        ("gspo", "forward_kl_topk", ("dp=2", "tp=2,cp=2", WIDE)),
        ("grpo", "reverse_kl_topk", ("tp=2,pp=2,ep=2", "pp=2,vpp=2,cp=2")),
    ],
)
def test_a_divergence_is_that_of_the_formula_on_every_layout(
    pool: Pool, name: str, form: str, layouts: tuple[str, ...]
) -> None:
    alone = check(pool, name, layouts, form=form, top_k=5)
    metrics = alone.metrics
    assert metrics["distill/loss"] > 1e-3 and 0 < metrics["distill/greedy_agreement"] < 1
    assert 5 / 45 < metrics["distill/top_k_mass"] < 1


class Itself(DistantReference):
    """The policy's own weights."""

    def __init__(self, policy: Policy, *, offload: bool) -> None:
        super(DistantReference, self).__init__(policy, offload=offload)


def itself(folder: str, policy: Policy, *, offload: bool) -> Itself:
    return Itself(policy, offload=offload)


@mock.patch.object(policy_update, "teacher_of", itself)
def update_with_itself(**arguments: Any) -> StepResult:
    arguments["batch"].advantages[:] = [0.0] * len(arguments["batch"].advantages)
    return run_update(**arguments)


@pytest.mark.parametrize("form", ["forward_kl_topk", "reverse_kl_topk"])
def test_a_teacher_that_is_the_policy_teaches_exactly_nothing(pool: Pool, form: str) -> None:
    """Without rewards the whole gradient is 0, in float32 too, bit by bit."""
    section = {"name": "gspo", "distillation": {"teacher": "x", "form": form, "top_k": 4}}
    for layout in ("tp=1", "tp=2,cp=2"):
        result = update(pool, odd_moe(layout, section, **NO_ROUTER_LOSSES), update_with_itself)
        assert result.metrics["distill/loss"] == 0 and result.metrics["loss"] == 0
        assert result.metrics["grad_norm"] == 0 and result.metrics["distill/greedy_agreement"] == 1
        assert not any(gradient.any() for gradient in result.gradients.values())
