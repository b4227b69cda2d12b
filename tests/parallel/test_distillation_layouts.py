"""On-policy distillation: the update is the same on every layout, and equals the update
by the formulas."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from gspo_megatron.models.build import Policy
from gspo_megatron.rl import distillation
from gspo_megatron.types import RolloutBatch
from gspo_megatron.verify import parity
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
# The advantages of whole sequences are float32, even if the model is not.
FP32_ADVANTAGES = 1e-6
WIDE = "tp=2,pp=2,cp=2,ep=2"


def distant_teacher(folder: str, policy: Policy, *, offload: bool) -> DistantReference:
    """A teacher that needs no folder. Its weights are computed from the policy's weights, so they
    are the same on every layout."""
    return DistantReference(policy, offload=offload)


@mock.patch.object(distillation, "teacher_of", distant_teacher)
def update_with_a_teacher(**arguments: Any) -> StepResult:
    return run_update(**arguments)


def run(pool: Pool, layout: str, section: dict[str, Any]) -> StepResult:
    config = odd_moe(layout, section, training=FP64, **NO_ROUTER_LOSSES)
    return update(pool, config, update_with_a_teacher)


def check(pool: Pool, name: str, layouts: tuple[str, ...], **distillation: Any) -> StepResult:
    """Check that the update on one rank equals the update by the formulas, and that every layout
    makes the same update as one rank."""
    distillation = {"teacher": "a folder", "coefficient": 0.5, **distillation}
    section = {"name": name, "distillation": distillation}
    alone = run(pool, "tp=1", section)
    plain = odd_moe("tp=1", section, training=FP64, **NO_ROUTER_LOSSES)
    formulas = update(pool, plain, explicit, teachers=[DistantReference] * 13)
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


LAYOUTS = ("dp=2", "tp=2,cp=2", "pp=2,vpp=2,ep=2", WIDE)


@pytest.mark.parametrize(
    ("name", "layouts"),
    [
        # an advantage for each sequence
        ("gspo", ("tp=2,cp=2", WIDE)),
        # an advantage for each token
        ("gspo_token", ("dp=2", "tp=2,cp=2")),
        ("grpo", ("pp=2,vpp=2,ep=2", WIDE)),
        *(
            pytest.param(name, LAYOUTS, marks=pytest.mark.full)
            for name in ("gspo", "gspo_token", "grpo")
        ),
    ],
)
def test_an_advantage_is_that_of_the_formula_on_every_layout(
    pool: Pool, name: str, layouts: tuple[str, ...]
) -> None:
    check(pool, name, layouts)


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
    """A teacher with the policy's own weights."""

    def __init__(self, policy: Policy, *, offload: bool) -> None:
        super(DistantReference, self).__init__(policy, offload=offload)


def itself(folder: str, policy: Policy, *, offload: bool) -> Itself:
    return Itself(policy, offload=offload)


@mock.patch.object(distillation, "teacher_of", itself)
def update_with_itself(**arguments: Any) -> StepResult:
    arguments["batch"].advantages[:] = [0.0] * len(arguments["batch"].advantages)
    return run_update(**arguments)


FORMS = ["forward_kl_topk", pytest.param("reverse_kl_topk", marks=pytest.mark.full)]


@pytest.mark.parametrize("form", FORMS)
def test_a_teacher_that_is_the_policy_teaches_exactly_nothing(pool: Pool, form: str) -> None:
    """Without rewards the gradient is exactly 0, also in float32."""
    section = {"name": "gspo", "distillation": {"teacher": "x", "form": form, "top_k": 4}}
    for layout in ("tp=1", "tp=2,cp=2"):
        result = update(pool, odd_moe(layout, section, **NO_ROUTER_LOSSES), update_with_itself)
        assert result.metrics["distill/loss"] == 0 and result.metrics["loss"] == 0
        assert result.metrics["grad_norm"] == 0 and result.metrics["distill/greedy_agreement"] == 1
        assert not any(gradient.any() for gradient in result.gradients.values())


class Other(DistantReference):
    """A second teacher, with other weights than the first."""

    @torch.no_grad()
    def __init__(self, policy: Policy, *, offload: bool) -> None:
        super(DistantReference, self).__init__(policy, offload=offload)
        for weight in self._weights:
            weight.sub_(0.1 * torch.sin(53.0 * weight))


FOLDERS = {"math": DistantReference, "code": Other}


def one_of_two(folder: str, policy: Policy, *, offload: bool) -> DistantReference:
    return FOLDERS[folder](policy, offload=offload)


def of_three_kinds(**columns: Any) -> RolloutBatch:
    """The responses have no teacher, the first teacher, and the second teacher, in turn."""
    return RolloutBatch(**columns, teachers=(columns["sample_index"] % 3 - 1).to(torch.int32))


@mock.patch.object(distillation, "teacher_of", one_of_two)
@mock.patch.object(parity, "RolloutBatch", of_three_kinds)
def update_with_two_teachers(**arguments: Any) -> StepResult:
    return run_update(**arguments)


@pytest.mark.parametrize("form", ["reverse_kl", "forward_kl_topk"])
def test_each_response_learns_from_its_own_teacher_on_every_layout(pool: Pool, form: str) -> None:
    teachers = {name: {"teacher": name} for name in FOLDERS} | {"chat": {}}
    section: dict[str, Any] = {"name": "grpo"}
    section["distillation"] = {"field": "domain", "teachers": teachers, "form": form}
    section["distillation"] |= {} if form == "reverse_kl" else {"top_k": 5}

    def run(layout: str) -> StepResult:
        config = odd_moe(layout, section, training=FP64, **NO_ROUTER_LOSSES)
        return update(pool, config, update_with_two_teachers)

    alone, plain = run("tp=1"), odd_moe("tp=1", section, training=FP64, **NO_ROUTER_LOSSES)
    kinds = [None, DistantReference, Other]
    formulas = update(pool, plain, explicit, teachers=[kinds[n % 3] for n in range(13)])
    assert_same_gradients(alone, formulas, FP64_TOLERANCE)
    assert alone.metrics["loss"] == pytest.approx(formulas.metrics["loss"], rel=1e-10)
    for layout in ("dp=2,ep=2", "tp=2,pp=2", "dp=2,cp=2"):
        assert_same_update(run(layout), alone, FP64_TOLERANCE)


def of_a_server(**columns: Any) -> RolloutBatch:
    """Log-probs as the server of a teacher might send them, computed from each token. Positions
    with fewer than k entries are filled up."""
    batch = RolloutBatch(**columns)
    said = columns["rollout_logprobs"].double()  # [response tokens], all different
    places = torch.arange(4, device=said.device)
    tokens = (said[:, None].abs() * 1e6).long() % 11 + 11 * places
    logprobs = -1.5 - places - said[:, None].abs().clamp_max(1.0)
    tokens[:, 3] = -1
    logprobs[:, 3] = -torch.inf
    batch.teacher_tokens, batch.teacher_top_logprobs = tokens.int(), logprobs.float()
    batch.teacher_logprobs = (said - 0.3).float()
    return batch


@mock.patch.object(parity, "RolloutBatch", of_a_server)
def update_with_a_server(**arguments: Any) -> StepResult:
    return run_update(**arguments)


@pytest.mark.parametrize("form", FORMS)
def test_what_a_server_said_travels_with_its_tokens(pool: Pool, form: str) -> None:
    distillation = {"url": "http://nowhere", "form": form, "top_k": 4}
    section = {"name": "gspo", "distillation": distillation}

    def run(layout: str) -> StepResult:
        config = odd_moe(layout, section, training=FP64, **NO_ROUTER_LOSSES)
        return update(pool, config, update_with_a_server)

    alone = run("tp=1")
    assert alone.metrics["distill/loss"] > 0.1
    for layout in ("dp=2", "tp=2,pp=2,cp=2"):
        assert_same_update(run(layout), alone, FP64_TOLERANCE)
