"""Which routers get a hook, and that nobody pays for one who does not want it."""

from __future__ import annotations

import inspect
import re
from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
from megatron.core.transformer.moe.router import Router, TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay

from gspo_megatron.models.build import Policy
from gspo_megatron.rl.routing_replay import RoutingReplay
from gspo_megatron.routing.hooks import NEVER_ASKING, attach_hooks, routed
from gspo_megatron.routing.replay import Recording, recorded
from tests.unit.routing.steps import (
    LAYERS,
    TOP_K,
    micro_batches,
    moe_policy,
    update,
    updater_for,
)

pytestmark = pytest.mark.usefixtures("one_rank")


def routers(policy: Policy) -> list[TopKRouter]:
    return [m for m in policy.models[0].modules() if isinstance(m, TopKRouter)]


def test_every_router_gets_a_hook_with_its_layer_number() -> None:
    policy = moe_policy(num_layers=4, moe_layer_freq=[0, 1, 0, 1])
    assert attach_hooks(policy.models) == (2, 4)
    assert [router.router_replay.layer for router in routers(policy)] == [2, 4]
    assert attach_hooks(policy.models) == (2, 4)  # once more is no harm


def test_without_replay_and_volatility_there_is_no_hook_and_no_work() -> None:
    policy = moe_policy()
    updater = updater_for(policy, {})
    assert not isinstance(updater.replay, RoutingReplay)
    metrics = update(updater)
    assert all(router.router_replay is None for router in routers(policy))
    assert not [name for name in metrics if name.startswith(("routing/", "replay/"))]


def test_routers_that_never_ask_are_refused() -> None:
    policy = moe_policy()
    policy.config.moe_router_fusion = True
    with pytest.raises(AssertionError, match="a fused router never asks"):
        attach_hooks(policy.models)
    policy.config.moe_router_fusion = False
    for kind in ("sinkhorn", "quantile_balancing"):
        routers(policy)[1].routing_type = kind
        with pytest.raises(AssertionError, match=f"{kind} routing never asks"):
            attach_hooks(policy.models)


def test_whatever_chooses_experts_asks_its_hook_or_is_refused() -> None:
    """Megatron-Core's own list of what a router can do: a new way past the hook is seen here."""
    source = inspect.getsource(TopKRouter.routing)
    kinds = set(re.findall(r'self\.routing_type == "(\w+)"', source))
    assert "sinkhorn" in kinds and kinds <= set(NEVER_ASKING)
    call = r"topk_routing_with_score_function\((.*?)\n            \)"
    (asking,) = re.findall(call, source, re.DOTALL)
    assert "router_replay=self.router_replay" in asking
    function = inspect.getsource(topk_routing_with_score_function)
    choices = re.findall(r"(?<!_)torch\.topk\(|= compute_topk\(|return fused_\w+\(", function)
    # The one torch.topk is the default that the hook is given, and the fused way is refused.
    assert choices.count("torch.topk(") == 1
    assert sum(choice.startswith("return fused") for choice in choices) == 1
    assert choices.count("= compute_topk(") == 4


def test_full_experts_drop_no_replayed_tokens() -> None:
    policy = moe_policy(moe_expert_capacity_factor=1.0)
    for routing in ({"replay": "r2"}, {"reference_replay": "r3"}):
        with pytest.raises(AssertionError, match="would drop tokens that are replayed"):
            updater_for(policy, routing)
    updater_for(policy, {"volatility": True})


def test_routers_of_another_kind_are_refused() -> None:
    class HashRouter(Router):
        def __init__(self) -> None:
            torch.nn.Module.__init__(self)
            self.config = SimpleNamespace(moe_router_fusion=False)

        def routing(self, logits: torch.Tensor) -> None:
            """Abstract in Router; nothing is routed here."""

        def forward(self, hidden: torch.Tensor) -> None:
            """Likewise."""

    policy = torch.nn.Module()
    policy.router = HashRouter()
    with pytest.raises(AssertionError, match="HashRouter has no place for a hook"):
        attach_hooks([policy])


def test_hooks_stay_out_of_megatrons_process_wide_list() -> None:
    before = len(RouterReplay.global_router_replay_instances)
    attach_hooks(moe_policy().models)
    assert len(RouterReplay.global_router_replay_instances) == before


def test_routes_hold_for_the_passes_inside_and_no_longer() -> None:
    policy = moe_policy()
    attach_hooks(policy.models)
    (batch, *_) = micro_batches(policy)
    outer, inner = Recording(), Recording()

    def forward() -> None:
        packed = batch.packed
        policy.models[0](
            input_ids=packed.input_ids,
            position_ids=packed.position_ids,
            attention_mask=None,
            labels=batch.head,
            packed_seq_params=batch.packed_seq_params,
        )

    with torch.no_grad():
        forward()
        with routed(outer):
            with routed(inner):
                forward()
            assert not outer.experts and len(inner.experts) == LAYERS
            forward()
        forward()  # a third recording of a layer would be an error
        with recorded() as experts:
            forward()
    assert experts.keys() == outer.experts.keys() == {1, 2}
    tokens = batch.packed.input_ids.numel()
    for layer, chosen in experts.items():
        assert chosen.shape == (tokens, TOP_K)
        assert torch.equal(chosen, outer.experts[layer])
