"""Each known trap of Routing Replay by name: put in as a mistake it is noticed; ours is without.

Traps that need several stages are in tests/parallel/test_replay.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.transformer.moe import router as router_module
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay

from gspo_megatron.batching.micro_batches import response_logprobs
from gspo_megatron.config import check_config
from gspo_megatron.errors import UserError
from gspo_megatron.rl.routing_replay import RoutingReplay
from gspo_megatron.routing.hooks import RouterHook, attach_hooks, routed
from gspo_megatron.routing.replay import Recording, Replaying, RouteTable
from tests.unit.models.one_rank import tiny_config
from tests.unit.routing import mistakes
from tests.unit.routing.steps import (
    EXPERTS,
    TOP_K,
    a_step,
    builder_for,
    map_of,
    micro_batches,
    moe_policy,
    update,
    updater_for,
    watched,
)

pytestmark = pytest.mark.usefixtures("one_rank")


def run(routing: dict[str, Any], recompute: str = "none", **megatron: Any) -> None:
    """A step whose own checks decide."""
    updater = updater_for(moe_policy(recompute, **megatron), routing)
    update(updater, routes=routing.get("replay") == "r3")


@pytest.fixture
def stock_list() -> Any:
    RouterReplay.clear_global_router_replay_instances()
    yield RouterReplay.global_router_replay_instances
    RouterReplay.clear_global_router_replay_instances()


def test_trap_process_wide_list_is_corrupted_by_a_second_model(stock_list: list) -> None:
    """Stock: replay data go to routers in the order of construction, of whatever model."""
    policy = [RouterReplay(), RouterReplay()]
    reference = [RouterReplay(), RouterReplay()]
    assert stock_list == policy + reference
    with pytest.raises(ValueError, match="does not match instances"):
        RouterReplay.set_replay_data([torch.zeros(1), torch.ones(1)])

    other = moe_policy()
    with (
        mistakes.routers_numbered_by_construction(other.models),
        pytest.raises(AssertionError, match=r"layers \(3, 4\) recorded of \(1, 2\)"),
    ):
        run({"replay": "r2"})
    run({"replay": "r2"})  # ours, beside the same other model


def test_trap_moe_router_fusion_returns_before_the_hook() -> None:
    for routing in ({"replay": "r2"}, {"replay": "r3"}, {"volatility": True}):
        config = tiny_config(model={"megatron": {"moe_router_fusion": True}}, routing=routing)
        with pytest.raises(UserError, match="a fused router does not call the hook"):
            check_config(config, 1)
    # and if a fused router got past that
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
            run({"replay": mode})  # nothing is recomputed


def test_trap_forward_only_passes_fill_a_queue(stock_list: list) -> None:
    """Stock: each forward pass that replays appends to what a backward pass would take."""
    router = RouterReplay()
    for _ in range(1000):
        router.set_target_indices(torch.zeros((3, TOP_K), dtype=torch.long))
    assert len(router.replay_backward_list) == 1000

    updater = updater_for(moe_policy(), {"replay": "r2"})
    batches = micro_batches(updater.policy)
    for _ in range(3):
        response_logprobs(updater.policy, batches)
    assert all(batch.recorded_routes is None for batch in batches)
    # Routes of a step that never came to its training pass would pile up: noticed at the next.
    updater.replay.start([batches[:1], batches[1:]])
    with updater.replay.old_pass(batches[1:]):
        response_logprobs(updater.policy, batches[1:])
    with pytest.raises(AssertionError, match="recorded routes were never used"):
        updater.replay.start([batches])


def test_trap_aux_loss_recomputes_its_own_top_k() -> None:
    """So it does here: the routers' balance is a matter of what they would choose by themselves.
    On replayed experts, which no longer depend on the router, the load would be a constant."""
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
    def load_of_padding(routing_mistake: bool) -> list[int]:
        """Tokens of padding at each expert of the first layer, in one padded micro-batch."""
        policy = moe_policy()
        routes = updater_for(policy, {"replay": "r3"}).replay
        step = a_step(routes=True)
        tokens = [step.sequences.tokens[n] for n in range(4)]
        lengths = list(step.index.response_lengths[:4])
        batch = builder_for(policy, padded=True).build(range(4), tokens, lengths, [0, 5, 14, 16])
        batch.rollout_routes = [step.sequences.routes[n] for n in range(4)]
        if routing_mistake:
            with mistakes.padding_replays_zeros():
                routes.start([[batch]])
        else:
            routes.start([[batch]])
        batch.routes = Replaying(batch.recorded_routes.tables["r3"])
        # An expert named twice for a token: newer Megatron-Core counts, and stops after the router.
        stops = contextlib.suppress(RuntimeError) if routing_mistake else contextlib.nullcontext()
        with watched() as seen, stops:
            response_logprobs(policy, [batch])
        padding = batch.packed.padding_mask.t().flatten()
        assert padding.sum() > 15
        return seen[0].chosen[padding].sum(0).tolist()

    wrong, right = load_of_padding(True), load_of_padding(False)
    assert wrong[1:] == [0] * (EXPERTS - 1)
    assert right[0] <= sum(right) / 2 and sum(load > 0 for load in right) > 1


def test_trap_a_rollout_engine_leaves_zeros_where_it_has_no_routes() -> None:
    """They are no routes: an expert is chosen once, not k times."""
    for bad in ([0, 0], [3, 3], [1, EXPERTS], [-1, 2]):
        updater = updater_for(moe_policy(), {"replay": "r3"})
        step = a_step(routes=True)
        routes = {n: r.to(torch.int16) for n, r in step.sequences.routes.items()}
        routes[2][-1] = 0  # a last token has none, and needs none
        routes[3][4, 1] = torch.tensor(bad, dtype=torch.int16)
        step.sequences.routes = routes
        with pytest.raises(AssertionError, match="an expert twice for one token, or one that"):
            updater.build_micro_batches(step.plans, step.sequences, step.index)


def test_trap_scores_from_what_the_router_would_have_chosen() -> None:
    """Recorded experts that are not among these would have a weight without a gradient."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn((20, EXPERTS), generator=generator).requires_grad_()
    experts = logits.detach().topk(2 * TOP_K).indices[:, TOP_K:]  # the next best: none of the best
    table = RouteTable((1,), experts[None].to(torch.uint8), None)

    def gradient() -> torch.Tensor:
        with routed(Replaying(table)):
            weights, _ = topk_routing_with_score_function(
                logits, TOP_K, router_replay=RouterHook(1)
            )
        upstream = torch.randn(weights.shape, generator=torch.Generator().manual_seed(2))
        return torch.autograd.grad((weights * upstream).sum(), logits, allow_unused=True)[0]

    assert gradient().abs().sum(-1).min() > 1e-3
    with mistakes.weights_of_what_the_router_would_have_chosen():
        assert gradient().abs().max() == 0


def test_trap_weights_of_the_recorded_pass() -> None:
    """Kept with the experts, they are those of the old router, and the live one learns nothing."""
    generator = torch.Generator().manual_seed(1)
    old, live = torch.randn((2, 20, EXPERTS), generator=generator).unbind()
    live.requires_grad_()

    def weights() -> torch.Tensor:
        recording, hook = Recording(), RouterHook(1)
        with routed(recording):
            topk_routing_with_score_function(old, TOP_K, router_replay=hook)
        with routed(Replaying(recording.table())):
            return topk_routing_with_score_function(live, TOP_K, router_replay=hook)[0]

    chosen = map_of(old.topk(TOP_K).indices)
    right = live.masked_fill(~chosen, -torch.inf).softmax(-1)
    torch.testing.assert_close(weights(), right)
    assert weights().requires_grad
    with mistakes.weights_of_the_recorded_pass():
        assert not weights().requires_grad
        assert (weights() - right).abs().max() > 0.1


def test_trap_near_ties_flip_under_recomputation() -> None:
    """All experts alike but for noise that differs from pass to pass, as rounding does on a
    device: natural routes flip, so that the gradients are those of another forward pass than the
    loss. Replayed ones stay."""
    native = TopKRouter.gating
    generator = torch.Generator().manual_seed(1)

    def noisy(self: TopKRouter, hidden: torch.Tensor) -> torch.Tensor:
        logits = 1e-3 * native(self, hidden)
        return logits + 1e-3 * torch.randn(logits.shape, generator=generator)

    def flips(mode: str) -> list[int]:
        """Tokens whose experts differ, of each layer that is recomputed."""
        updater = updater_for(moe_policy("full"), {"replay": mode})
        with mock.patch.object(TopKRouter, "gating", noisy), watched() as seen:
            update(updater, routes=mode == "r3")
        replays = mode == "off"
        pairs = []
        passes = [one for one in seen if replays or isinstance(one.routes, Replaying)]
        for again, one in enumerate(passes):
            if one.with_gradients:
                first = [p for p in passes[:again] if p.layer == one.layer][-1]
                known = torch.ones(len(one.chosen), dtype=torch.bool)
                if isinstance(one.routes, Replaying) and one.routes._table.known is not None:
                    known = one.routes._table.known
                pairs.append(int((first.chosen != one.chosen)[known].any(-1).sum()))
        return pairs

    assert sum(flips("off")) > 50
    assert len(flips("r2")) == 8 and sum(flips("r2")) == 0
    assert len(flips("r3")) == 12 and sum(flips("r3")) == 0


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
    """Their layer numbers begin at 1 again."""
    model, other = moe_policy().models[0], moe_policy().models[0]
    policy = torch.nn.Module()
    policy.decoder, policy.mtp = model.decoder, other.decoder
    assert attach_hooks([policy]) == (1, 2)
    routers = [layer.mlp.router for layer in other.decoder.layers]
    assert all(router.router_replay is None for router in routers)
    # By any other name its layer numbers would be the decoder's, unless the routers know it.
    del policy.mtp
    policy.further = other.decoder
    for is_mtp_layer in (True, False):
        for router in routers:
            router.is_mtp_layer = is_mtp_layer
        if is_mtp_layer:
            assert attach_hooks([policy]) == (1, 2)
    with pytest.raises(AssertionError, match="two routers of one layer number"):
        attach_hooks([policy])


def test_trap_the_first_mini_batch_has_no_routes_of_its_own() -> None:
    """Under r2 it needs none: its training pass is the old policy's pass."""
    updater = updater_for(moe_policy(), {"replay": "r2"})
    kept = []
    native = RoutingReplay.training_pass

    @contextlib.contextmanager
    def spy(self: RoutingReplay, batch: Any) -> Iterator[None]:
        with native(self, batch):
            kept.append([micro_batch.routes for micro_batch in batch])
            yield

    with mock.patch.object(RoutingReplay, "training_pass", spy):
        update(updater)
    assert kept[0] == [None, None]
    assert all(isinstance(routes, Replaying) for later in kept[1:] for routes in later)
