"""Routing Replay changes the update, and the changed update is the same on every layout."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import TopKRouter

from gspo_megatron.routing import hooks
from gspo_megatron.routing.replay import Observing, Recording, Replaying
from gspo_megatron.verify.parity import Cut
from gspo_megatron.verify.results import StepResult, compare
from gspo_megatron.verify.synthetic import SyntheticBatch, synthetic_batch
from tests.parallel.branches import branched_batch
from tests.parallel.models import NO_ROUTER_LOSSES, VOCAB_SIZE, odd_moe
from tests.parallel.pool import Pool, RankError
from tests.parallel.updates import (
    FP64_TOLERANCE_OF_ROUTERS,
    assert_same_gradients,
    assert_same_update,
    update,
    update_away_from_the_reference,
)
from tests.unit.routing import mistakes

LAYOUTS = ("tp=2", "pp=2", "pp=2,vpp=2", "ep=2", "cp=2", "tp=2,pp=2,ep=2,cp=2")
RECOMPUTES = ("none", "selective", "full")
EXPERTS, TOP_K, LAYERS, MOE_LAYERS = 8, 2, 4, 3


@dataclass
class Watched:
    """An update, with counts over all ranks. Only rank 0 gets this result."""

    result: StepResult
    replayed: int  # tokens x layers whose forward pass had to follow routes
    # tokens x layers whose experts in Megatron-Core's routing map are not the right ones
    wrong: int
    moved: int  # those of `replayed` for which the router would choose other experts
    passes: dict[str, int]  # forward passes of routers, by the use of routes


def watched_update(mistake: str | None = None, **arguments: Any) -> Watched:
    """An update that is watched. `mistake`: the name of a mistake in
    tests.unit.routing.mistakes."""
    with getattr(mistakes, mistake)() if mistake else nullcontext():
        return watched(update_away_from_the_reference, **arguments)


def watched(update: Callable[..., StepResult], **arguments: Any) -> Watched:
    """Make an update, and compare every routing map of Megatron-Core with the routes of the
    pass."""
    counts, passes = defaultdict(int), defaultdict(int)
    native = TopKRouter.routing

    def routing(self: TopKRouter, logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        routes = hooks._current.get()
        passes[type(routes).__name__] += 1
        # A checkpointed training pass, which is repeated for the gradients.
        passes["checkpointed"] += isinstance(routes, Observing) and not torch.is_grad_enabled()
        probs, chosen = native(self, logits, *args, **kwargs)
        inner = routes.inner if isinstance(routes, (Observing, Recording)) else routes
        if isinstance(inner, Replaying):
            table = inner._table
            wanted = table.experts[table.layers.index(self.layer_number)].long()
            maps = torch.zeros_like(chosen).scatter(1, wanted, True)
            known = table.known if table.known is not None else torch.ones(len(maps)).bool()
            with torch.no_grad(), hooks.routed(None):
                natural = native(self, logits, *args, **kwargs)[1]
            counts["replayed"] += int(known.sum())
            counts["wrong"] += int(((maps != chosen).any(-1) & known).sum())
            counts["wrong"] += int(((natural != chosen).any(-1) & ~known).sum())
            counts["moved"] += int(((maps != natural).any(-1) & known).sum())
            # Only chosen experts have weights, which come from the current router.
            assert not (probs[~chosen] != 0).any()
        return probs, chosen

    with mock.patch.object(TopKRouter, "routing", routing):
        result = update(**arguments)
    values = torch.tensor([counts[name] for name in ("replayed", "wrong", "moved")])
    dist.all_reduce(values)
    return Watched(result, *values.tolist(), passes=dict(passes))


def with_routes(batch: SyntheticBatch, topk: int = TOP_K) -> SyntheticBatch:
    """The batch with random experts for every token and layer. No router would choose them."""
    generator = torch.Generator().manual_seed(3)
    routes = [
        torch.rand((len(tokens), LAYERS, EXPERTS), generator=generator).topk(topk).indices
        for tokens in batch.tokens
    ]
    return replace(batch, routes=[r.to(torch.uint8) for r in routes])


def run(
    pool: Pool,
    layout: str,
    objective: dict[str, Any] | None = None,
    *,
    packing: bool = True,
    recompute: str = "none",
    mistake: str | None = None,
    alike: bool = False,
    **routing: Any,
) -> Watched:
    """Make an update of three mini-batches. `alike`: all sequences have the same length."""
    training = {"precision": "fp64", "packing": packing, "recompute": recompute}
    megatron = dict(NO_ROUTER_LOSSES)
    if recompute == "selective":
        megatron["recompute_modules"] = ["moe"]  # whole MoE layers, routers included
    objective = objective or {"name": "grpo"}
    config = odd_moe(layout, objective, training=training, routing=routing, **megatron)
    size = {"shortest": 13, "longest": 13} if alike else {}
    batch = synthetic_batch(config.objective, VOCAB_SIZE, **size)
    if "r3" in config.routing.modes:
        batch = with_routes(batch)
    options = {"batch": batch, "cut": Cut(replicas=2, token_budget=40, multiple=2)}
    return update(pool, config, watched_update, mistake=mistake, mini_batches=3, **options)


@pytest.fixture(scope="module")
def alone(pool: Pool) -> dict[str, Watched]:
    """The updates on one rank."""
    return {mode: run(pool, "tp=1", replay=mode, volatility=True) for mode in ("off", "r2", "r3")}


def test_without_replay_experts_change_and_the_change_is_logged(alone: dict[str, Watched]) -> None:
    metrics = alone["off"].result.metrics
    assert alone["off"].replayed == 0
    assert 0.01 < metrics["routing/volatility"] < 0.9
    assert metrics["routing/tokens_changed"] >= metrics["routing/volatility"]
    assert metrics["routing/layer_02/volatility"] > 0
    assert "routing/layer_01/volatility" not in metrics  # layer 1 is dense
    assert "replay/bytes" not in metrics


@pytest.mark.parametrize("mode", ["r2", "r3"])
def test_replay_changes_the_update(alone: dict[str, Watched], mode: str) -> None:
    """The difference is larger than rounding, because the routers would choose other experts."""
    assert alone[mode].moved > 0
    differences = compare(alone["off"].result.gradients, alone[mode].result.gradients)
    assert differences[0][1] > 1e-3


# Each layout with stages is tested with each kind of recomputation, because other micro-batches may
# begin between a forward pass and its recomputation. Each other layout is tested with one kind.
WAYS = (("r2", True), ("r3", False), ("r3", True), ("r2", False))
SELECTION = [
    ("tp=2", "r2", True, "none"),
    ("ep=2", "r3", False, "selective"),
    ("cp=2", "r2", False, "full"),
    *(
        (layout, *WAYS[(row + column) % len(WAYS)], recompute)
        for row, layout in enumerate(layout for layout in LAYOUTS if "pp=2" in layout)
        for column, recompute in enumerate(RECOMPUTES)
    ),
]
REST = [
    case
    for case in itertools.product(LAYOUTS, ("r2", "r3"), (True, False), RECOMPUTES)
    if case not in SELECTION
]


@pytest.mark.parametrize(
    ("layout", "mode", "packing", "recompute"),
    [*SELECTION, *(pytest.param(*case, marks=pytest.mark.full) for case in REST)],
)
def test_every_token_goes_to_the_recorded_experts_on_every_layout(
    pool: Pool, alone: dict[str, Watched], layout: str, mode: str, packing: bool, recompute: str
) -> None:
    options = {"replay": mode, "volatility": True, "packing": packing, "recompute": recompute}
    watched = run(pool, layout, **options)
    assert watched.replayed > 0
    assert watched.wrong == 0
    assert (watched.passes["checkpointed"] > 0) == (recompute != "none")
    results = watched.result, alone[mode].result
    if packing:  # the stored routes include padding
        assert_same_update(*results, FP64_TOLERANCE_OF_ROUTERS, but="replay/bytes")
    else:  # without packing, layouts have different micro-batches
        assert_same_gradients(*results, FP64_TOLERANCE_OF_ROUTERS)


def test_a_route_takes_one_byte_a_layer_and_expert(alone: dict[str, Watched]) -> None:
    tokens = [len(t) for t in synthetic_batch(odd_moe("tp=1").objective, VOCAB_SIZE).tokens]
    # A micro-batch without a sequence has one padding token. There are fewer than two dozen such
    # micro-batches.
    for mode, needed in (("r3", sum(tokens)), ("r2", sum(tokens[4:]))):
        stored = alone[mode].result.metrics["replay/bytes"] / (MOE_LAYERS * TOP_K)
        # With r2, the first of three mini-batches needs no routes. This mini-batch has 4 of the 13
        # sequences.
        assert needed <= stored <= needed + 24, mode


@pytest.mark.parametrize(("layout", "packing"), [("tp=1", False), ("cp=2", True)])
def test_branches_of_an_episode_follow_the_rollouts_experts(
    pool: Pool, layout: str, packing: bool
) -> None:
    """Each token has routes, except the last one of each branch, because the rollout engine never
    got it as input."""
    training = {"precision": "fp64", "packing": packing}
    config = odd_moe(layout, {"name": "gspo"}, training=training, routing={"replay": "r3"})
    batch = with_routes(branched_batch())
    pieces = [sum(lengths) for branches in batch.branches for lengths in branches]
    ends = torch.tensor(pieces).cumsum(0) - 1
    flat = torch.cat(batch.routes)
    flat[ends] = 0  # the rollout has no routes for these tokens
    batch = replace(batch, routes=list(flat.split([len(tokens) for tokens in batch.tokens])))
    cut = Cut(replicas=2, token_budget=40, multiple=2)
    watched = update(pool, config, watched_update, batch=batch, cut=cut)
    assert watched.wrong == 0
    assert watched.replayed == MOE_LAYERS * (sum(pieces) - len(pieces))


KL = {"name": "grpo", "kl": "k3", "kl_coefficient": 0.5}
DIFFERENT = [("off", "r2"), ("off", "r3"), ("r2", "off"), ("r2", "r3"), ("r3", "off"), ("r3", "r2")]
APART = [("cp=2", "off", "r2"), ("pp=2,vpp=2", "r2", "r3"), ("tp=2", "r3", "r2")]
APART_REST = [
    (layout, *modes)
    for layout, modes in itertools.product(LAYOUTS, DIFFERENT)
    if (layout, *modes) not in APART
]


@pytest.mark.parametrize(
    ("layout", "policy", "reference"),
    [*APART, *(pytest.param(*case, marks=pytest.mark.full) for case in APART_REST)],
)
def test_policy_and_reference_replay_apart_on_every_layout(
    pool: Pool, layout: str, policy: str, reference: str
) -> None:
    modes = {"replay": policy, "reference_replay": reference, "objective": KL}
    plain = run(pool, "tp=1", **modes)
    sharded = run(pool, layout, **modes, recompute="full")
    assert min(plain.replayed, sharded.replayed) > 0
    assert plain.wrong == sharded.wrong == 0
    results = sharded.result, plain.result
    # replay/bytes also counts padding.
    assert_same_update(*results, FP64_TOLERANCE_OF_ROUTERS, but="replay/bytes")
    if reference != "off":
        other = run(pool, "tp=1", **modes | {"reference_replay": "off"})
        distance = compare(plain.result.gradients, other.result.gradients)[0][1]
        assert distance > 1e-3, "the reference's mode does nothing"


# Traps of Routing Replay that need several stages or ranks. Each trap is planted, and must be
# noticed.


@pytest.mark.parametrize(("layout", "alike"), [("pp=2", False), ("pp=2,vpp=2", True)])
def test_trap_newest_micro_batch_only_under_1f1b_with_recomputation(
    pool: Pool, layout: str, alike: bool
) -> None:
    """Other micro-batches begin between the forward pass of a micro-batch and its recomputation. If
    all micro-batches have one length, only the count of uses shows the mistake."""
    options = {"mistake": "newest_routes_only", "alike": alike, "replay": "r2"}
    said = r"never asked|more than once" if alike else r"routes of \d+ tokens|never asked"
    with pytest.raises(RankError, match=said):
        run(pool, layout, recompute="full", **options)
    # Without recomputation, the newest routes are the right ones, and the mistake changes nothing.
    watched = run(pool, layout, **options)
    assert watched.replayed > 0 and watched.wrong == 0


def test_trap_layers_of_virtual_stages_are_numbered_from_1_each(pool: Pool) -> None:
    with pytest.raises(RankError, match="two routers of one layer number"):
        run(pool, "pp=2,vpp=2", mistake="layers_numbered_within_their_stage", replay="r2")


def test_a_stage_without_routers_takes_part(pool: Pool, alone: dict[str, Watched]) -> None:
    """The first of four layers is dense, and the first of four stages has only this layer."""
    watched = run(pool, "pp=4", replay="r2", volatility=True)
    assert watched.wrong == 0 < watched.replayed
    assert watched.result.metrics["routing/tokens_changed"] > 0
    tolerance = FP64_TOLERANCE_OF_ROUTERS
    assert_same_update(watched.result, alone["r2"].result, tolerance, but="replay/bytes")
