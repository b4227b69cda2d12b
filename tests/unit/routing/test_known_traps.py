"""The known traps of Routing Replay, by name. Each test plants a trap, checks that it is noticed,
and that the package does not fall into it.

Some traps are tested elsewhere. test_gates.py is for two wrong kinds of gate weights: those of the
recorded pass, and those of the experts that the router would have chosen. It compares the gate
weights and their gradients with the right ones. test_replayed_steps.py is for near ties that flip
in recomputation, and for a first mini-batch without routes. It checks that each pass takes the
recorded experts. Traps that need several stages are in tests/parallel/test_replay.py.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.transformer.moe import router as router_module

from gspo_megatron.batching.micro_batches import response_logprobs
from gspo_megatron.config import check_config
from gspo_megatron.errors import UserError
from gspo_megatron.routing.hooks import attach_hooks
from gspo_megatron.routing.replay import Replaying, RouteTable
from tests.unit.models.one_rank import tiny_config
from tests.unit.routing import mistakes
from tests.unit.routing.steps import (
    EXPERTS,
    a_step,
    builder_for,
    micro_batches,
    moe_policy,
    update,
    updater_for,
    watched,
)

pytestmark = pytest.mark.usefixtures("one_rank")


def run(routing: dict[str, Any], recompute: str = "none", **megatron: Any) -> None:
    """Run a step. Its own checks raise an error if something is wrong."""
    updater = updater_for(moe_policy(recompute, **megatron), routing)
    update(updater, routes=routing.get("replay") == "r3")


def test_trap_process_wide_list_is_corrupted_by_a_second_model() -> None:
    """Megatron-Core gives its replay data to routers in the order of construction, even if they
    belong to another model."""
    other = moe_policy()
    with (
        mistakes.routers_numbered_by_construction(other.models),
        pytest.raises(AssertionError, match=r"layers \(3, 4\) recorded of \(1, 2\)"),
    ):
        run({"replay": "r2"})
    run({"replay": "r2"})  # the package's own numbering, beside the other model


def test_trap_moe_router_fusion_returns_before_the_hook() -> None:
    for routing in ({"replay": "r2"}, {"replay": "r3"}, {"volatility": True}):
        config = tiny_config(model={"megatron": {"moe_router_fusion": True}}, routing=routing)
        with pytest.raises(UserError, match="a fused router does not call the hook"):
            check_config(config, 1)
    # If the check let a fused router pass, the replay would notice it.
    with mistakes.fused_routers(), pytest.raises(AssertionError, match="layers"):
        run({"replay": "r2"})
    with mistakes.fused_routers(), pytest.raises(AssertionError, match="never asked"):
        run({"replay": "r3"})


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_trap_recomputation_does_not_know_its_micro_batch(recompute: str) -> None:
    for mode in ("r2", "r3"):
        with (
            mistakes.recomputation_without_context(),
            pytest.raises(AssertionError, match=r"layers \[1, 2\] never asked for their routes"),
        ):
            run({"replay": mode}, recompute)
        with mistakes.recomputation_without_context():
            run({"replay": mode})  # without recomputation there is no error


def test_trap_forward_only_passes_fill_a_queue() -> None:
    """Routes of a step that never reached its training pass would pile up. The start of the next
    step notices them."""
    updater = updater_for(moe_policy(), {"replay": "r2"})
    batches = micro_batches(updater.policy)
    updater.replay.start([batches[:1], batches[1:]])
    with updater.replay.during("old", batches[1:]):
        response_logprobs(updater.policy, batches[1:])
    with pytest.raises(AssertionError, match="recorded routes were never used"):
        updater.replay.start([batches])


def test_trap_aux_loss_recomputes_its_own_top_k() -> None:
    """The package also uses the routers' own top k here: the auxiliary loss balances the experts
    that the routers would choose themselves. Replayed experts do not depend on the router, so their
    load would be a constant."""
    policy = moe_policy(moe_aux_loss_coeff=0.1)
    updater = updater_for(policy, {"replay": "r2"})
    counted = []
    native = router_module.get_tokens_per_expert_and_token_count

    def spy(routing_map: torch.Tensor, **kwargs: Any) -> Any:
        counted.append(routing_map.clone())
        return native(routing_map=routing_map, **kwargs)

    with (
        mock.patch.object(router_module, "get_tokens_per_expert_and_token_count", spy),
        watched() as seen,
    ):
        update(updater)
    trained = [one for one in seen if one.with_gradients]
    differ = 0
    for one, balanced in zip(trained, counted, strict=True):
        assert torch.equal(balanced.bool(), one.natural)
        differ += int((one.natural != one.chosen).sum())
    assert differ > 0


def test_trap_padding_rows_of_zeros_go_to_expert_0() -> None:
    """Padding of a padded micro-batch goes to the experts that its router chooses."""
    policy = moe_policy()
    routes = updater_for(policy, {"replay": "r3"}).replay
    step = a_step(routes=True)
    tokens = [step.sequences.tokens[n] for n in range(4)]
    lengths = list(step.index.response_lengths[:4])
    batch = builder_for(policy, padded=True).build(range(4), tokens, lengths, [0, 5, 14, 16])
    batch.rollout_routes = [step.sequences.routes[n] for n in range(4)]
    routes.start([[batch]])
    batch.routes = Replaying(batch.recorded_routes.tables["r3"])
    with watched() as seen:
        response_logprobs(policy, [batch])
    padding = batch.packed.padding_mask.t().flatten()
    assert padding.sum() > 15
    for one in seen:
        assert torch.equal(one.chosen[padding], one.natural[padding])
        assert (one.chosen[padding].sum(0) > 0).sum() > 1


def test_trap_a_rollout_engine_leaves_zeros_where_it_has_no_routes() -> None:
    """A row of zeros is refused as a route, because a token chooses k different experts."""
    for bad in ([0, 0], [3, 3], [1, EXPERTS], [-1, 2]):
        updater = updater_for(moe_policy(), {"replay": "r3"})
        step = a_step(routes=True)
        routes = {n: r.to(torch.int16) for n, r in step.sequences.routes.items()}
        routes[2][-1] = 0  # the last token of a sequence has no routes and needs none
        routes[3][4, 1] = torch.tensor(bad, dtype=torch.int16)
        step.sequences.routes = routes
        with pytest.raises(AssertionError, match="an expert twice for one token, or one that"):
            updater.build_micro_batches(step.plans, step.sequences, step.index)


def test_tokens_that_follow_no_route() -> None:
    """The rollout engine never computes the last token of a sequence. With one expert for each
    token, its row of zeros would look like a route. A server may leave out other tokens."""
    updater, step = updater_for(moe_policy(), {"replay": "r3"}), a_step(routes=True)
    assert step.sequences.routes is not None
    for routes in step.sequences.routes.values():
        routes[0] = 0
    for batches in updater.build_micro_batches(step.plans, step.sequences, step.index):
        for batch in batches:  # each has one sequence, without padding
            known = batch.recorded_routes.tables["r3"].known
            assert known is not None
            assert known.tolist() == [False] + [True] * (len(known) - 2) + [False]


@pytest.mark.parametrize("mode", ["r2", "r3"])
@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        (mistakes.replay_of_nothing, "never asked for their routes"),
        (mistakes.one_layer_is_passed_by, r"layers \[2\] never asked for their routes"),
        (mistakes.routes_are_never_given_up, "recorded routes were never used"),
    ],
)
def test_trap_replay_data_are_not_consumed_exactly_once(mode: str, mistake: Any, said: str) -> None:
    with mistake(), pytest.raises(AssertionError, match=said):
        run({"replay": mode})


def test_trap_replay_data_get_lost() -> None:
    with mistakes.routes_get_lost(), pytest.raises(AssertionError, match="no routes to replay"):
        run({"replay": "r2"})


def test_trap_a_pass_is_recorded_or_replayed_twice() -> None:
    with (
        mistakes.experts_are_recorded_twice(),
        pytest.raises(AssertionError, match="layer 1 is recorded already"),
    ):
        run({"replay": "r2"})
    scores = torch.rand((3, 4), requires_grad=True)
    replaying = Replaying(RouteTable((5,), torch.zeros((1, 3, 2), dtype=torch.uint8), None))
    for _ in range(2):
        replaying.choose(5, scores, lambda: scores.topk(2))
    with pytest.raises(AssertionError, match=r"layers \[5\] asked .* more than once"):
        replaying.assert_used(training=True)


def test_trap_layers_of_multi_token_prediction_are_counted_in() -> None:
    """The numbers of the layers of multi-token prediction begin with 1, and so do the numbers of
    the decoder's layers."""
    model, other = moe_policy().models[0], moe_policy().models[0]
    policy = torch.nn.Module()
    policy.decoder, policy.mtp = model.decoder, other.decoder
    with pytest.raises(AssertionError, match="two routers of one layer number"):
        attach_hooks([policy])
