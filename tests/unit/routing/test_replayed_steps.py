"""Whole updates on one rank: recorded routes are used exactly once, and nothing else changes the
result."""

from __future__ import annotations

import contextlib
import gc
import tracemalloc
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from gspo_megatron.batching.micro_batches import MicroBatch, forward_backward, response_logprobs
from gspo_megatron.config.schema import RoutingSection
from gspo_megatron.models.optimizer import zero_gradients
from gspo_megatron.routing.hooks import attach_hooks
from gspo_megatron.routing.replay import (
    Observing,
    Recording,
    Replaying,
    RouteTable,
    RoutingReplay,
)
from tests.unit.routing.steps import (
    LAYERS,
    LENGTHS,
    RECOMPUTES,
    TOP_K,
    Seen,
    map_of,
    micro_batches,
    moe_policy,
    parameters_after,
    update,
    updater_for,
    watched,
)

pytestmark = pytest.mark.usefixtures("one_rank")

CPU = torch.device("cpu")


def replayed(seen: list[Seen]) -> Iterator[tuple[Seen, RouteTable]]:
    """The passes in which routers had to follow routes, with their tables."""
    for one in seen:
        routes = one.routes
        inner = routes.inner if isinstance(routes, (Observing, Recording)) else routes
        if isinstance(inner, Replaying):
            yield one, inner._table


@pytest.mark.parametrize("recompute", RECOMPUTES)
@pytest.mark.parametrize("mode", ["r2", "r3"])
def test_every_token_goes_to_its_recorded_experts(mode: str, recompute: str) -> None:
    policy = moe_policy(recompute)
    updater = updater_for(policy, {"replay": mode})
    with watched() as seen:
        metrics = update(updater, routes=mode == "r3")
    moved = 0
    training = []
    for one, table in replayed(seen):
        experts = map_of(table.experts[table.layers.index(one.layer)])
        known = torch.ones(len(experts), dtype=torch.bool) if table.known is None else table.known
        assert torch.equal(one.chosen[known], experts[known])
        assert torch.equal(one.chosen[~known], one.natural[~known])
        # The weights are a softmax of the current logits over the recorded experts.
        weights = one.logits.masked_fill(~one.chosen, -torch.inf).softmax(-1)
        torch.testing.assert_close(one.weights, weights)
        moved += int((one.natural != experts)[known].any(-1).sum())
        if one.with_gradients:
            training.append(one)
    # For more than 10 rows, the routers would choose other experts without replay.
    assert moved > 10, "the routers would have gone there anyway"
    # The number of micro-batches that replay routes. With r2, the first mini-batch replays none.
    replaying = {"r2": 4, "r3": 6}[mode]
    assert len(training) == replaying * LAYERS
    # With recomputation, each pass with gradients follows a pass without them.
    again = [one for one in seen if not one.with_gradients and isinstance(one.routes, Replaying)]
    old_pass = {"r2": 0, "r3": 4}[mode] * LAYERS
    assert len(again) == old_pass + (recompute != "none") * replaying * LAYERS
    lengths = [prompt + response for prompt, response in LENGTHS]
    tokens = sum(lengths[2:] if mode == "r2" else lengths)
    assert metrics["replay/bytes"] == tokens * LAYERS * TOP_K


class Recorded:
    """A policy with recorded routes for the last two of three micro-batches."""

    def __init__(self, recompute: str = "none") -> None:
        self.policy = moe_policy(recompute)
        self.updater = updater_for(self.policy, {"replay": "r2"})
        self.routes = self.updater.replay
        first, *self.batch = micro_batches(self.policy)
        self.routes.start([[first], self.batch])
        with self.routes.during("old", self.batch), watched() as self.seen:
            response_logprobs(self.policy, self.batch)

    def train(self) -> list[Seen]:
        def loss(_: MicroBatch, logprobs: torch.Tensor, __: torch.Tensor) -> Any:
            return logprobs.sum(), None

        zero_gradients(self.policy.chunks, self.updater.trainer.optimizer)
        with self.routes.during("training", self.batch), watched() as seen:
            forward_backward(self.policy, self.batch, loss, len(self.batch))
        return [one for one in seen if one.with_gradients]


@pytest.mark.parametrize("recompute", RECOMPUTES)
def test_strongly_perturbed_routers_keep_the_experts_and_move_the_weights(recompute: str) -> None:
    setting = Recorded(recompute)
    routers = [layer.mlp.router for layer in setting.policy.models[0].decoder.layers]
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for router in routers:
            noise = torch.randn(router.weight.shape, generator=generator)
            router.weight.add_(noise * 3 * router.weight.std())
    trained = setting.train()
    if recompute != "none":  # recomputation visits the layers in reverse order
        order = [trained[n] for start in (0, 2) for n in (start + 1, start)]
        trained = order
    for before, after in zip(setting.seen, trained, strict=True):
        assert before.layer == after.layer
        assert torch.equal(before.chosen, after.chosen)
        assert (after.natural != after.chosen).any(-1).float().mean() > 0.5
        assert (before.weights - after.weights).abs().amax(-1).median() > 0.1
    for router in routers:  # the routers get gradients for the experts that were used
        assert router.weight.main_grad.norm() > 1e-3
    setting.routes.metrics()


def test_another_model_between_record_and_replay_changes_nothing() -> None:
    plain = parameters_after({"replay": "r2", "volatility": True})
    native = RoutingReplay.during
    runs = []

    @contextlib.contextmanager
    def disturbed(self: RoutingReplay, name: str, batch: list[MicroBatch]) -> Iterator[None]:
        if name != "training":
            with native(self, name, batch):
                yield
            return
        other = moe_policy()
        with torch.no_grad():
            for parameter in other.models[0].parameters():
                parameter.mul_(1.5)
        own = RoutingReplay(other, RoutingSection(replay="r2", volatility=True), CPU)
        others = micro_batches(other)
        own.start([others[:1], others[1:]])
        with native(own, "old", others[1:]):
            response_logprobs(other, others)
        assert all("r2" in one.recorded_routes.tables for one in others[1:])
        runs.append(batch)
        with native(self, name, batch):
            # another model runs while these routes wait for their pass
            response_logprobs(other, others)
            yield

    with mock.patch.object(RoutingReplay, "during", disturbed):
        after = parameters_after({"replay": "r2", "volatility": True})
    assert len(runs) == 3
    assert all(torch.equal(plain[name], after[name]) for name in plain)


def live_tensors() -> int:
    gc.collect()
    return sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())


def test_a_thousand_forward_passes_leave_nothing_behind() -> None:
    policy = moe_policy()
    routes = RoutingReplay(policy, RoutingSection(replay="r2", volatility=True), CPU)
    attach_hooks(policy.models)
    first, second, _ = micro_batches(policy)

    def passes(count: int) -> None:
        for number in range(count):
            second.routes = Recording(keep_scores=True) if number % 2 else None
            response_logprobs(policy, [second])
            second.routes = None

    routes.start([[first], [second]])
    passes(10)
    tensors = live_tensors()
    tracemalloc.start()
    passes(10)
    before = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    passes(980)
    tracemalloc.start()
    passes(10)
    after = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert live_tensors() == tensors
    # The limit is in bytes. The routes of one pass are Python objects of about 2000 bytes.
    assert after < before + 20_000
    for batch in (first, second):
        assert not batch.recorded_routes.tables and batch.recorded_routes.natural is None
    routes.metrics()


def test_a_step_leaves_nothing_behind() -> None:
    policy = moe_policy()
    updater = updater_for(policy, {"replay": "r2", "volatility": True, "store_on_host": True})
    update(updater)
    update(updater)
    before = live_tensors()
    for _ in range(3):
        update(updater)
    assert live_tensors() == before
