"""routing.reference_replay: the experts that the reference policy uses. These experts do not depend
on what the policy replays."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from gspo_megatron.models.reference import ReferencePolicy
from gspo_megatron.rl.policy_update import PolicyUpdater
from gspo_megatron.routing.replay import Replaying, RoutingReplay
from tests.unit.routing.steps import (
    LAYERS,
    LENGTHS,
    RECOMPUTES,
    TOP_K,
    Seen,
    a_step,
    map_of,
    moe_policy,
    update,
    updater_for,
    watched,
)

pytestmark = pytest.mark.usefixtures("one_rank")

KL = {"name": "grpo", "kl": "k3", "kl_coefficient": 0.5}
MODES = ("off", "r2", "r3")
# Each micro-batch has one sequence. The first mini-batch has two micro-batches.
SEQUENCES, FIRST = len(LENGTHS), 2
TOKENS = [prompt + response for prompt, response in LENGTHS]


class DistantReference(ReferencePolicy):
    """A reference policy whose weights are far from those of the policy. Its routers choose
    different experts."""

    @torch.no_grad()
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        generator = torch.Generator().manual_seed(6)
        for weight in self._weights:
            weight.add_(0.1 * torch.randn(weight.shape, generator=generator))


class Step:
    """An update in which the work of the policy's routers is recorded, pass by pass."""

    def __init__(self, recompute: str = "none", **routing: Any) -> None:
        self.policy = moe_policy(recompute)
        with mock.patch("gspo_megatron.rl.policy_update.ReferencePolicy", DistantReference):
            self.updater = updater_for(self.policy, routing, KL)
        self.spans: dict[str, slice] = {}
        # (mode, sequence) for all routes that are kept after the reference's pass
        self.kept: set[tuple[str, int]] = set()
        with watched() as self.seen, self._watch():
            self.metrics = update(self.updater, routes="r3" in routing.values())
        end = max((span.stop for span in self.spans.values()), default=0)
        self.spans["training"] = slice(end, len(self.seen))

    @contextlib.contextmanager
    def _watch(self) -> Iterator[None]:
        record, native = PolicyUpdater._store_logprobs, RoutingReplay.during

        def recorded(updater: PolicyUpdater, batches: Any, name: str) -> None:
            start = len(self.seen)
            record(updater, batches, name)
            self.spans[name.removesuffix("_logprobs")] = slice(start, len(self.seen))

        @contextlib.contextmanager
        def during(routes: RoutingReplay, name: str, batches: Any) -> Iterator[None]:
            with native(routes, name, batches):
                yield
            if name != "reference":
                return
            self.kept = {
                (mode, batch.packed.members[0])
                for batch in batches
                for mode in batch.recorded_routes.tables
            }

        with (
            mock.patch.object(PolicyUpdater, "_store_logprobs", recorded),
            mock.patch.object(RoutingReplay, "during", during),
        ):
            yield

    def routers(self, name: str) -> dict[tuple[int, int], Seen]:
        """The records of the routers in the pass `name`, by (sequence, layer). Some passes cover
        only the last sequences of the step."""
        passed = self.seen[self.spans.get(name, slice(0))]
        missing = SEQUENCES - len(passed) // LAYERS
        found = {(missing + place // LAYERS, one.layer): one for place, one in enumerate(passed)}
        assert len(found) == len(passed), "one pass of a router a micro-batch"
        assert all(len(one.chosen) == TOKENS[number] for (number, _), one in found.items())
        return found

    def weights(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.policy.models[0].named_parameters()}


def expected(step: Step, mode: str, key: tuple[int, int], one: Seen) -> Tensor:
    """The experts that a router must use for the tokens of a sequence in a mode: [tokens, experts]
    bool."""
    number, layer = key
    if mode == "r3":
        rollout = map_of(a_step(routes=True).sequences.routes[number][:, layer - 1])
        # The last token has no recorded route, because an engine never has it as an input.
        return torch.cat([rollout[:-1], one.natural[-1:]])
    return step.routers("old")[key].natural if mode == "r2" else one.natural


@pytest.mark.parametrize(("policy", "reference"), list(itertools.product(MODES, MODES)))
def test_every_pass_uses_the_experts_of_its_own_mode(policy: str, reference: str) -> None:
    step = Step(replay=policy, reference_replay=reference)
    everything = set(itertools.product(range(SEQUENCES), range(1, LAYERS + 1)))
    later = {(number, layer) for number, layer in everything if number >= FIRST}
    old, training = step.routers("old"), step.routers("training")
    assert old.keys() == (everything if reference == "r2" else later)
    assert step.routers("reference").keys() == training.keys() == everything
    moved = {"reference": 0, "training": 0}
    passes = [("old", "r3" if policy == "r3" else "off")]
    passes += [("reference", reference), ("training", policy)]
    for name, mode in passes:
        for key, one in step.routers(name).items():
            spared = name == "training" and mode == "r2" and key not in later
            wanted = expected(step, "off" if spared and key not in old else mode, key, one)
            assert torch.equal(one.chosen, wanted), (name, key)
            moved[name] = moved.get(name, 0) + int((one.chosen != one.natural).any(-1).sum())
    assert (moved["training"] > 10) == (policy != "off")
    assert (moved["reference"] > 10) == (reference != "off")
    # Routes are stored once, even if both policies use them, and are freed after the last use.
    modes = {policy, reference} - {"off"}
    recorded = sum(TOKENS if reference == "r2" else TOKENS[FIRST:])
    stored = recorded * ("r2" in modes) + sum(TOKENS) * ("r3" in modes)
    assert step.metrics.get("replay/bytes", 0) == stored * LAYERS * TOP_K
    covered = {number for number, _ in old} if policy == "r2" else set(range(SEQUENCES))
    assert step.kept == ({(policy, number) for number in covered} if policy != "off" else set())


@pytest.mark.parametrize(("policy", "reference"), [("r2", "r3"), ("r3", "r2"), ("off", "r2")])
def test_recomputation_storage_and_volatility_change_no_weight(policy: str, reference: str) -> None:
    routing = {"replay": policy, "reference_replay": reference}
    plain = Step(**routing).weights()
    for recompute in RECOMPUTES[1:]:
        other = Step(recompute, **routing, store_on_host=True, volatility=True).weights()
        assert all(torch.equal(plain[name], other[name]) for name in plain)


def test_volatility_is_of_the_policy_alone() -> None:
    plain, mixed = Step(volatility=True), Step(volatility=True, reference_replay="r3")
    assert "routing/replayed_max_violation" not in mixed.metrics
    # The first update is different, so all later results differ slightly.
    assert mixed.metrics["routing/volatility"] != plain.metrics["routing/volatility"]
    assert mixed.metrics["routing/volatility"] < 0.9


def test_routes_for_a_reference_that_never_comes_are_noticed() -> None:
    updater = updater_for(moe_policy(), {"reference_replay": "r2"}, {"name": "grpo"})
    assert updater.reference is None
    with pytest.raises(AssertionError, match="recorded routes were never used"):
        update(updater)


@pytest.mark.parametrize(("policy", "reference"), [("r3", "r3"), ("r2", "r3"), ("off", "r2")])
def test_a_reference_pass_that_goes_past_its_routes_is_noticed(policy: str, reference: str) -> None:
    native = RoutingReplay.during

    @contextlib.contextmanager
    def forgotten(self: RoutingReplay, name: str, micro_batches: Any) -> Iterator[None]:
        with native(self, name, micro_batches):
            # The pass runs as if the routers of the model had no hooks.
            for micro_batch in micro_batches if name == "reference" else ():
                assert isinstance(micro_batch.routes, Replaying)
                micro_batch.routes = Unasked(micro_batch.routes)
            yield

    class Unasked(Replaying):
        def __init__(self, inner: Replaying) -> None:
            super().__init__(inner._table)

        def choose(self, layer: int, scores: Any, native: Any) -> Any:
            return native()

    with (
        mock.patch.object(RoutingReplay, "during", forgotten),
        pytest.raises(AssertionError, match="never asked for their routes"),
    ):
        Step(replay=policy, reference_replay=reference)
