"""Megatron-Core's routing function with a hook, compared with loops over single tokens."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
from megatron.core.transformer.moe.router import Router, TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay
from torch import Tensor

from gspo_megatron.models.build import Policy
from gspo_megatron.models.router import BiasedChoice
from gspo_megatron.routing.hooks import NEVER_ASKING, RouterHook, Routes, attach_hooks, routed
from gspo_megatron.routing.replay import (
    Recording,
    Replaying,
    RouteTable,
    RoutingReplay,
    expert_dtype,
    recorded,
)
from tests.unit.routing.steps import (
    LAYERS,
    micro_batches,
    moe_policy,
    update,
    updater_for,
)

pytestmark = pytest.mark.usefixtures("one_rank")

EXPERTS, TOP_K = 8, 4

# The arguments of topk_routing_with_score_function, as TransformerConfig's fields set them.
ROUTERS: dict[str, dict[str, Any]] = {
    "softmax of the chosen": {},
    "softmax of all": {"use_pre_softmax": True},
    "sigmoid": {"score_function": "sigmoid"},
    "sigmoid with expert bias": {
        "score_function": "sigmoid",
        "expert_bias": torch.linspace(0.2, -0.2, EXPERTS),
        "scaling_factor": 2.5,
    },
    "limited groups": {"num_groups": 4, "group_topk": 2},
    "sigmoid, bias, limited groups": {
        "score_function": "sigmoid",
        "expert_bias": torch.linspace(-0.1, 0.1, EXPERTS),
        "num_groups": 4,
        "group_topk": 2,
        "scaling_factor": 1.5,
    },
    # This router is the package's own (models/router.py).
    "softmax with expert bias": {
        "use_pre_softmax": True,
        "softmax_bias": torch.linspace(-0.3, 0.3, EXPERTS),
    },
}


def chosen_experts(logits: Tensor, router: dict[str, Any]) -> list[list[int]]:
    """The k experts of each token, sorted by number."""
    scores = selection_scores(logits, router)
    return [best_experts(row.tolist(), router) for row in scores]


def selection_scores(logits: Tensor, router: dict[str, Any]) -> Tensor:
    """The scores [tokens, experts]. A router takes the experts with the largest scores."""
    if router.get("score_function") == "sigmoid":
        scores = torch.sigmoid(logits)
        return scores + router["expert_bias"] if "expert_bias" in router else scores
    if "softmax_bias" in router:
        return torch.softmax(logits, dim=-1) + router["softmax_bias"]
    return torch.softmax(logits, dim=-1) if router.get("use_pre_softmax") else logits


def best_experts(scores: Sequence[float], router: dict[str, Any]) -> list[int]:
    """The experts with the best of one token's `selection_scores`, sorted by number."""
    allowed = list(range(EXPERTS))
    if router.get("group_topk"):
        size, each = EXPERTS // router["num_groups"], TOP_K // router["group_topk"]
        groups = [allowed[start : start + size] for start in range(0, EXPERTS, size)]
        worth = [sum(sorted((scores[e] for e in group), reverse=True)[:each]) for group in groups]
        best = sorted(range(len(groups)), key=lambda g: -worth[g])[: router["group_topk"]]
        allowed = [expert for g in best for expert in groups[g]]
    return sorted(sorted(allowed, key=lambda e: -scores[e])[:TOP_K])


def gate_weights(logits: Tensor, experts: Tensor, router: dict[str, Any]) -> Tensor:
    """The weights [tokens, experts], which are 0 except for the given experts [tokens, k]. They are
    differentiable in the logits."""
    rows = []
    for row, chosen in zip(logits, experts.tolist()):
        if router.get("score_function") == "sigmoid":
            scores = torch.stack([torch.sigmoid(row[e]) for e in chosen])
            scores = scores / (scores.sum() + 1e-20)
        elif router.get("use_pre_softmax"):
            scores = torch.stack([row[e].exp() for e in chosen]) / row.exp().sum()
            if "softmax_bias" in router:
                scores = scores / scores.sum().clamp(min=1e-12)
        else:
            scores = torch.stack([row[e].exp() for e in chosen])
            scores = scores / scores.sum()
        scores = scores * router.get("scaling_factor", 1.0)
        weights = dict(zip(chosen, scores))
        rows.append(torch.stack([weights.get(e, row.new_zeros(())) for e in range(EXPERTS)]))
    return torch.stack(rows)


# --- The routing function with a hook: recorded experts, and weights of the current logits --------

TOKENS, LAYER = 11, 3

every_router = pytest.mark.parametrize("name", ROUTERS)


def random_logits(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((TOKENS, EXPERTS), generator=generator, dtype=torch.float32)


def route(logits: Tensor, router: dict[str, Any], routes: Routes | None) -> tuple[Tensor, Tensor]:
    """The weights [tokens, experts], and the map [tokens, experts] of chosen experts."""
    with routed(routes):
        return routed_by(RouterHook(LAYER), logits, router)


def routed_by(
    hook: RouterHook | None, logits: Tensor, router: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    stock = {name: value for name, value in router.items() if name != "softmax_bias"}
    if "softmax_bias" in router:
        hook = BiasedChoice(router["softmax_bias"], hook)
    return topk_routing_with_score_function(logits, TOP_K, router_replay=hook, **stock)


def recorded_table(logits: Tensor, router: dict[str, Any]) -> RouteTable:
    recording = Recording()
    route(logits, router, recording)
    return recording.table()


@every_router
def test_a_hook_without_routes_changes_nothing(name: str) -> None:
    logits = random_logits(1)
    stock = routed_by(None, logits, ROUTERS[name])
    for ours, theirs in zip(route(logits, ROUTERS[name], None), stock):
        assert torch.equal(ours, theirs)


@every_router
def test_recorded_experts_are_those_of_the_plain_choice(name: str) -> None:
    logits = random_logits(1)
    recording = Recording(keep_scores=True)
    weights, chosen = route(logits, ROUTERS[name], recording)
    table = recording.table()
    assert table.layers == (LAYER,) and table.experts.shape == (1, TOKENS, TOP_K)
    assert table.experts[0].sort(-1).values.tolist() == chosen_experts(logits, ROUTERS[name])
    assert torch.equal(weights, route(logits, ROUTERS[name], None)[0])
    assert torch.equal(chosen, torch.zeros_like(chosen).scatter(1, table.experts[0].long(), True))


@every_router
def test_replay_takes_the_recorded_experts_and_the_live_weights(name: str) -> None:
    """The gradients through the weights also equal the gradients of the formula."""
    router = ROUTERS[name]
    table = recorded_table(random_logits(1), router)
    logits = random_logits(2).requires_grad_()
    weights, chosen = route(logits, router, Replaying(table))
    experts = table.experts[0].long()
    assert torch.equal(chosen, torch.zeros_like(chosen).scatter(1, experts, True))
    natural = route(logits, router, None)[1]
    assert (natural != chosen).any(-1).sum() > TOKENS / 3, "the test says little"

    expected = gate_weights(logits, experts, router)
    torch.testing.assert_close(weights, expected)
    upstream = random_logits(3)
    (gradient,) = torch.autograd.grad((weights * upstream).sum(), logits)
    (wanted,) = torch.autograd.grad((expected * upstream).sum(), logits)
    torch.testing.assert_close(gradient, wanted)
    assert gradient.abs().sum(-1).min() > 1e-4  # every token has a gradient


@every_router
def test_tokens_without_routes_go_where_they_like(name: str) -> None:
    router, logits = ROUTERS[name], random_logits(2)
    table = recorded_table(random_logits(1), router)
    table.known = torch.arange(TOKENS) % 3 > 0
    weights, chosen = route(logits, router, Replaying(table))
    natural_weights, natural = route(logits, router, None)
    assert torch.equal(chosen[~table.known], natural[~table.known])
    assert torch.equal(weights[~table.known], natural_weights[~table.known])
    recorded = torch.zeros_like(chosen).scatter(1, table.experts[0].long(), True)
    assert torch.equal(chosen[table.known], recorded[table.known])


def test_weights_of_experts_that_only_their_bias_chose() -> None:
    """The weights are divided by their sum, or by a lower bound if the sum is smaller. So very
    small weights do not sum to 1."""
    logits = torch.zeros(1, EXPERTS)
    logits[:, TOP_K:] = 40.0  # each of the chosen experts has a probability of 4e-18
    for smaller, total in ((0.0, 4 * 4.248e-18 / 4 / 1e-12), (20.0, 1.0)):
        logits[:, TOP_K:] = 40.0 - smaller
        router = {"use_pre_softmax": True, "softmax_bias": 2.0 * (torch.arange(EXPERTS) < TOP_K)}
        weights, chosen = route(logits, router, None)
        assert chosen.tolist() == [[True] * TOP_K + [False] * (EXPERTS - TOP_K)]
        assert weights.sum().item() == pytest.approx(total, rel=1e-3)


@pytest.mark.parametrize(
    ("experts", "dtype"),
    [(8, torch.uint8), (256, torch.uint8), (257, torch.int16), (4096, torch.int16)],
)
def test_a_byte_up_to_256_experts_and_two_beyond(experts: int, dtype: torch.dtype) -> None:
    assert expert_dtype(experts) is dtype
    logits = torch.zeros(3, experts)
    # the largest number of an expert must be stored correctly
    logits[:, -1], logits[:, 0] = 2.0, 1.0
    recording = Recording()

    def native() -> tuple[Tensor, Tensor]:
        return torch.topk(logits, k=2, dim=1)

    recording.choose(1, logits, native)
    table = recording.table()
    assert table.experts.dtype is dtype
    assert table.num_bytes == 3 * 2 * dtype.itemsize
    scores, chosen = Replaying(table).choose(1, logits, _never)
    assert chosen.dtype is torch.int64
    assert chosen.tolist() == [[experts - 1, 0]] * 3
    assert scores.tolist() == [[2.0, 1.0]] * 3


def _never() -> Any:
    raise AssertionError("a router whose routes are all known has no choice to make")


def test_routes_of_another_number_of_tokens_are_refused() -> None:
    table = recorded_table(random_logits(1), {})
    with pytest.raises(AssertionError, match="layer 3: routes of 11 tokens for 10"):
        route(random_logits(2)[:10], {}, Replaying(table))


# --- The routers that get a hook; a hook without routes costs nothing -----------------------------


def routers(policy: Policy) -> list[TopKRouter]:
    return [m for m in policy.models[0].modules() if isinstance(m, TopKRouter)]


def test_every_router_gets_a_hook_with_its_layer_number() -> None:
    policy = moe_policy(num_layers=4, moe_layer_freq=[0, 1, 0, 1])
    assert attach_hooks(policy.models) == (2, 4)
    assert [router.router_replay.layer for router in routers(policy)] == [2, 4]
    assert attach_hooks(policy.models) == (2, 4)  # a second call changes nothing


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
    """The kinds of routing are read from Megatron-Core's source, so the test notices a new kind
    that does not call the hook."""
    source = inspect.getsource(TopKRouter.routing)
    kinds = set(re.findall(r'self\.routing_type == "(\w+)"', source))
    assert "sinkhorn" in kinds and kinds <= set(NEVER_ASKING)
    call = r"topk_routing_with_score_function\((.*?)\n            \)"
    (asking,) = re.findall(call, source, re.DOTALL)
    assert "router_replay=self.router_replay" in asking
    function = inspect.getsource(topk_routing_with_score_function)
    choices = re.findall(r"(?<!_)torch\.topk\(|= compute_topk\(|return fused_\w+\(", function)
    # The only torch.topk is the default that the hook gets. The fused routing is refused.
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
            """Required, because the method is abstract in Router. It routes nothing."""

        def forward(self, hidden: torch.Tensor) -> None:
            """Required, like `routing`."""

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
        forward()  # recording a layer a third time would be an error
        with recorded() as experts:
            forward()
    assert experts.keys() == outer.experts.keys() == {1, 2}
    tokens = batch.packed.input_ids.numel()
    for layer, chosen in experts.items():
        assert chosen.shape == (tokens, policy.config.moe_router_topk)
        assert torch.equal(chosen, outer.experts[layer])
