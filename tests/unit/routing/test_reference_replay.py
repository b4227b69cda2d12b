"""routing.reference_replay: the reference policy of the KL divergence uses the replayed experts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from gspo_megatron.config.algorithm import RoutingSection
from gspo_megatron.models.reference import ReferencePolicy
from gspo_megatron.routing.replay import Replaying
from gspo_megatron.train.routes import StepRoutes
from tests.unit.routing.steps import (
    LAYERS,
    Seen,
    map_of,
    moe_policy,
    update,
    updater_for,
    watched,
)

pytestmark = pytest.mark.usefixtures("one_rank")

KL = {"name": "grpo", "kl": "k3", "kl_coefficient": 0.5}
MICRO_BATCHES = 6


class DistantReference(ReferencePolicy):
    """Far from the policy, whose own experts it would not choose."""

    @torch.no_grad()
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        generator = torch.Generator().manual_seed(6)
        for weight in self._weights:
            weight.add_(0.1 * torch.randn(weight.shape, generator=generator))


def step(routing: dict[str, Any]) -> tuple[dict[str, torch.Tensor], list[Seen], list[Seen]]:
    """The policy after a step, what routers did in the reference's pass, and all that they did."""
    policy = moe_policy()
    with mock.patch("gspo_megatron.train.step.ReferencePolicy", DistantReference):
        updater = updater_for(policy, routing, KL)
    native = updater.reference.in_place
    with watched() as seen:
        bounds = []

        @contextlib.contextmanager
        def in_place() -> Iterator[None]:
            with native():
                bounds.append(len(seen))
                yield
                bounds.append(len(seen))

        with mock.patch.object(updater.reference, "in_place", in_place):
            update(updater, routes=routing.get("replay") == "r3")
    start, end = bounds
    weights = {name: p.detach().clone() for name, p in policy.models[0].named_parameters()}
    return weights, seen[start:end], seen


@pytest.mark.parametrize("mode", ["r2", "r3"])
def test_the_reference_uses_the_policys_experts(mode: str) -> None:
    weights, reference, everything = step({"replay": mode, "reference_replay": True})
    assert len(reference) == MICRO_BATCHES * LAYERS
    moved = 0
    tables = set()
    for one in reference:
        if not isinstance(one.routes, Replaying):
            continue
        table = one.routes._table
        tables.add(id(table))
        experts = map_of(table.experts[table.layers.index(one.layer)])
        known = torch.ones(len(experts), dtype=torch.bool) if table.known is None else table.known
        assert torch.equal(one.chosen[known], experts[known])
        moved += int((one.natural != experts)[known].any(-1).sum())
    assert moved > 10, "the reference would have gone there anyway"
    # every micro-batch whose training pass replays has a reference that replays the same routes
    trained = {id(one.routes._table) for one in everything if one.with_gradients and one.routes}
    assert trained <= tables

    own, reference, _ = step({"replay": mode})
    assert all(one.routes is None for one in reference)
    assert all(torch.equal(one.chosen, one.natural) for one in reference)
    distance = max(float((weights[name] - own[name]).norm() / own[name].norm()) for name in own)
    assert distance > 1e-3, "the option does nothing"


def test_the_old_pass_has_to_cover_the_first_mini_batch_for_the_references_sake() -> None:
    """Under r2 its routes are needed for nothing else."""

    def wants_all(**section: Any) -> bool:
        routes = StepRoutes(moe_policy(), RoutingSection(**section), torch.device("cpu"))
        return routes.records_all

    assert wants_all(replay="r2", reference_replay=True)
    assert not wants_all(replay="r2")
    assert not wants_all(replay="r3", reference_replay=True)


def test_a_reference_pass_that_goes_past_its_routes_is_noticed() -> None:
    native = StepRoutes.set_reference_pass

    def forgotten(self: StepRoutes, micro_batches: Any) -> None:
        native(self, micro_batches)
        # as if the pass ran on a model whose routers have no hooks
        for micro_batch in micro_batches:
            if isinstance(micro_batch.routes, Replaying):
                micro_batch.routes = Unasked(micro_batch.routes)

    class Unasked(Replaying):
        def __init__(self, inner: Replaying) -> None:
            super().__init__(inner._table)

        def choose(self, layer: int, scores: Any, native: Any) -> Any:
            return native()

    with (
        mock.patch.object(StepRoutes, "set_reference_pass", forgotten),
        pytest.raises(AssertionError, match="never asked for their routes"),
    ):
        step({"replay": "r3", "reference_replay": True})
