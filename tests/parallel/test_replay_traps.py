"""Traps of Routing Replay that only several stages or ranks show, each put in and noticed."""

from __future__ import annotations

from typing import Any

import pytest

from gspo_megatron.verify.parity import Cut
from gspo_megatron.verify.synthetic import synthetic_batch
from tests.parallel.models import NO_ROUTER_LOSSES, VOCAB_SIZE, odd_moe
from tests.parallel.pool import Pool, RankError
from tests.parallel.replays import Watched, mistaken_update, watched_update
from tests.parallel.updates import FP64_TOLERANCE_OF_ROUTERS, assert_same_update, update


def run(
    pool: Pool,
    layout: str,
    mistake: str | None = None,
    *,
    recompute: str = "none",
    alike: bool = False,
    **routing: Any,
) -> Watched:
    """An update of three mini-batches; `alike`: all sequences of one length."""
    training = {"precision": "fp64", "recompute": recompute}
    config = odd_moe(
        layout, {"name": "grpo"}, training=training, routing=routing, **NO_ROUTER_LOSSES
    )
    size = {"shortest": 13, "longest": 13} if alike else {}
    batch = synthetic_batch(config.objective, VOCAB_SIZE, **size)
    function = mistaken_update if mistake else watched_update
    more = {"mistake": mistake} if mistake else {}
    cut = Cut(replicas=2, token_budget=40, multiple=2)
    return update(pool, config, function, batch=batch, cut=cut, mini_batches=3, **more)


@pytest.mark.parametrize("layout", ["pp=2", "pp=2,vpp=2", "tp=2"])
def test_trap_recomputation_does_not_know_its_micro_batch(pool: Pool, layout: str) -> None:
    with pytest.raises(RankError, match="never asked for their routes"):
        run(pool, layout, "recomputation_without_context", recompute="full", replay="r2")


@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.parametrize("layout", ["pp=2", "pp=2,vpp=2"])
def test_trap_newest_micro_batch_only_under_1f1b_with_recomputation(
    pool: Pool, layout: str, alike: bool
) -> None:
    """Between a micro-batch's forward pass and its recomputation others have begun. Where all are
    of one length nothing but the count of uses tells."""
    mistake = "newest_routes_only"
    said = r"never asked|more than once" if alike else r"routes of \d+ tokens|never asked"
    with pytest.raises(RankError, match=said):
        run(pool, layout, mistake, recompute="full", alike=alike, replay="r2")
    # Without recomputation the newest is the right one: it takes both to see it.
    watched = run(pool, layout, mistake, alike=alike, replay="r2")
    assert watched.replayed > 0 and watched.wrong == 0


def test_trap_layers_of_virtual_stages_are_numbered_from_1_each(pool: Pool) -> None:
    with pytest.raises(RankError, match="two routers of one layer number"):
        run(pool, "pp=2,vpp=2", "layers_numbered_within_their_stage", replay="r2")


def test_a_stage_without_routers_takes_part(pool: Pool) -> None:
    """The first of four layers is dense, and the first of four stages has no other."""
    alone = run(pool, "tp=1", replay="r2", volatility=True)
    watched = run(pool, "pp=4", replay="r2", volatility=True)
    assert watched.wrong == 0 < watched.replayed
    assert watched.result.metrics["routing/tokens_changed"] > 0
    tolerance = FP64_TOLERANCE_OF_ROUTERS
    assert_same_update(watched.result, alone.result, tolerance, but="replay/bytes")
