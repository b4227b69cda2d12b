"""Metrics of the routers, compared with results of plain loops over tokens."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from megatron.core import parallel_state
from torch import Tensor

from gspo_megatron.routing import replay
from gspo_megatron.routing.replay import Observing, Recording, Replaying, RouteTable
from gspo_megatron.routing.volatility import RoutingMetrics
from tests.unit.routing.steps import (
    EXPERTS,
    LAYERS,
    LENGTHS,
    TOP_K,
    Seen,
    moe_policy,
    update,
    updater_for,
    watched,
)

pytestmark = pytest.mark.usefixtures("one_rank")

CPU = torch.device("cpu")
TOKENS = 13


def top_k(scores: Tensor) -> Callable[[], tuple[Tensor, Tensor]]:
    return lambda: scores.topk(TOP_K, dim=1)


def reduced(figures: RoutingMetrics, *micro_batches: Observing) -> dict[str, float]:
    changed = [each.changed for each in micro_batches]
    return figures.reduce(changed, parallel_state.get_pipeline_model_parallel_group())


def all_real(tokens: int) -> Tensor:
    return torch.ones(tokens, dtype=torch.bool)


def violation_and_dead(experts: list[list[int]]) -> tuple[float, int]:
    loads = [sum(chosen.count(expert) for chosen in experts) for expert in range(EXPERTS)]
    mean = sum(loads) / EXPERTS
    return (max(loads) - mean) / mean, loads.count(0)


class Layers:
    """Old and new scores of each layer, and what an `Observing` computes from them."""

    def __init__(self, real: Tensor | None, *, replays: bool, recomputes: bool = False) -> None:
        generator = torch.Generator().manual_seed(2)
        size = (LAYERS, TOKENS, EXPERTS)
        # These values need few bits, so bfloat16 represents them exactly.
        self.old = torch.randint(-32, 32, size, generator=generator) / 16
        self.new = self.old + torch.randint(-16, 16, size, generator=generator) / 16
        self.new[:, ::3] = self.old[:, ::3]  # the scores of these tokens do not change
        self.real = all_real(TOKENS) if real is None else real
        recording = Recording(keep_scores=True)
        for layer, scores in enumerate(self.old, 1):
            recording.choose(layer, scores, top_k(scores))
        table = recording.table()
        other = torch.rand(size, generator=generator).topk(TOP_K).indices
        self.replayed = other if replays else None
        inner = Replaying(RouteTable((1, 2), other, None)) if replays else None
        self.figures = RoutingMetrics(LAYERS, EXPERTS, CPU, replayed=replays)
        self.observing = Observing(table, recording.scores, self.real, self.figures, inner)
        self.used = [
            self.observing.choose(layer, scores, top_k(scores))[1]
            for _ in range(1 + recomputes)
            for layer, scores in enumerate(self.new, 1)
        ]

    def found(self) -> dict[str, float]:
        return reduced(self.figures, self.observing)

    def expected(self) -> dict[str, float]:
        metrics: dict[str, float] = {}
        changed = set()
        tokens = self.real.nonzero().flatten().tolist()
        for layer in range(LAYERS):
            lost = shift = 0.0
            natural = []
            for token in tokens:
                before = set(self.old[layer, token].topk(TOP_K).indices.tolist())
                after = set(self.new[layer, token].topk(TOP_K).indices.tolist())
                natural.append(sorted(after))
                lost += 1 - len(before & after) / TOP_K
                shift += float((self.new[layer, token] - self.old[layer, token]).abs().mean())
                if before != after:
                    changed.add(token)
            prefix = f"routing/layer_{layer + 1:02d}"
            metrics[f"{prefix}/volatility"] = lost / len(tokens)
            metrics[f"{prefix}/logit_shift"] = shift / len(tokens)
            choices = {"": natural}
            if self.replayed is not None:
                choices["replayed_"] = self.replayed[layer, tokens].tolist()
            for label, experts in choices.items():
                worst, dead = violation_and_dead(experts)
                metrics[f"{prefix}/{label}max_violation"] = worst
                metrics[f"{prefix}/{label}dead_experts"] = dead
        for name in {name.rsplit("/", 1)[1] for name in metrics}:
            values = [metrics[f"routing/layer_{n + 1:02d}/{name}"] for n in range(LAYERS)]
            metrics[f"routing/{name}"] = sum(values) / (1 if "dead" in name else LAYERS)
        metrics["routing/tokens_changed"] = len(changed) / len(tokens)
        return metrics


@pytest.mark.parametrize("replays", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_figures_are_those_of_the_loops(padded: bool, replays: bool) -> None:
    real = torch.arange(TOKENS) % 5 > 0 if padded else None
    layers = Layers(real, replays=replays)
    found, expected = layers.found(), layers.expected()
    assert found == pytest.approx(expected)
    assert 0 < expected["routing/volatility"] < expected["routing/tokens_changed"] < 1
    if replays:
        assert found["routing/max_violation"] != found["routing/replayed_max_violation"]
    for layer, used in enumerate(layers.used):  # Observing has no effect on the choice of experts.
        wanted = layers.replayed[layer] if replays else layers.new[layer].topk(TOP_K).indices
        assert torch.equal(used, wanted)


def test_recomputation_is_not_counted_twice() -> None:
    once = Layers(None, replays=True).found()
    assert Layers(None, replays=True, recomputes=True).found() == once


def test_micro_batches_add_up_by_tokens_not_by_batches() -> None:
    """The mean is over tokens, so a short micro-batch counts less than a long one."""
    figures = RoutingMetrics(1, EXPERTS, CPU, replayed=False)
    old, other, micro_batches = torch.tensor([[0, 1]]), torch.tensor([[2, 3]]), []
    for changed, tokens in ((True, 1), (False, 9)):
        experts = old.expand(tokens, -1)
        table = RouteTable((1,), experts[None].to(torch.uint8), None)
        new = other.expand(tokens, -1) if changed else experts
        scores = torch.zeros(tokens, EXPERTS).scatter(1, new, 1.0)
        observing = Observing(table, {1: scores}, all_real(tokens), figures, None)
        observing.choose(1, scores, top_k(scores))
        micro_batches.append(observing)
    metrics = reduced(figures, *micro_batches)
    assert metrics["routing/volatility"] == metrics["routing/tokens_changed"] == 0.1
    assert metrics["routing/logit_shift"] == 0


@pytest.mark.parametrize("size", [0.0, 1e-5, 1e-3, 0.1])
def test_a_shift_far_below_bfloat16s_resolution_is_measured(size: float) -> None:
    """Old scores are stored in bfloat16, with a relative error of up to 2^-9."""
    generator = torch.Generator().manual_seed(4)
    old = torch.randn((4000, 64), generator=generator)
    new = old + size * torch.randn(old.shape, generator=generator)
    recording = Recording(keep_scores=True)
    recording.choose(1, old, top_k(old))
    figures = RoutingMetrics(1, 64, CPU, replayed=False)
    observing = Observing(recording.table(), recording.scores, all_real(4000), figures, None)
    observing.choose(1, new, top_k(new))
    expected = size * math.sqrt(2 / math.pi)  # the mean absolute value of a normal variable
    assert reduced(figures, observing)["routing/logit_shift"] == pytest.approx(expected, rel=0.1)


def experts_of(seen: list[Seen]) -> dict[int, list[list[int]]]:
    """The experts of each token, by layer."""
    found: dict[int, list[list[int]]] = {}
    for one in seen:
        for token in one.natural:
            found.setdefault(one.layer, []).append(token.nonzero().flatten().tolist())
    return found


@pytest.mark.parametrize(
    ("routing", "objective"),
    [
        ({}, {}),
        ({"replay": "r2"}, {}),
        # In this case the pass of the old policy also covers the first mini-batch, which must not
        # count in the metrics.
        ({"replay": "r2"}, {"kl": "k3", "kl_in": "reward", "kl_coefficient": 0.1}),
        ({"replay": "r3"}, {}),
    ],
)
def test_a_steps_volatility_compares_natural_choices(
    routing: dict[str, str], objective: dict[str, object]
) -> None:
    """The metrics compare the routers' own choices in the pass of the old policy with the routers'
    own choices in the training pass, for all mini-batches except the first. Which experts were used
    does not matter."""
    updater = updater_for(moe_policy(), {"volatility": True, **routing}, objective)
    with watched() as seen:
        metrics = update(updater, routes=routing.get("replay") == "r3")
    recording = [one for one in seen if isinstance(one.routes, Recording)]
    old = experts_of([one for one in recording if one.routes.scores])
    new = experts_of([one for one in seen if isinstance(one.routes, Observing)])
    changed = [False] * sum(map(sum, LENGTHS[2:]))  # the first mini-batch has two sequences
    for layer in (1, 2):
        lost = 0.0
        assert len(old[layer]) == len(changed)
        for token, (before, after) in enumerate(zip(old[layer], new[layer], strict=True)):
            lost += 1 - len({*before} & {*after}) / TOP_K
            changed[token] |= before != after
        prefix = f"routing/layer_{layer:02d}"
        assert metrics[f"{prefix}/volatility"] == pytest.approx(lost / len(changed))
        worst, dead = violation_and_dead(new[layer])
        assert metrics[f"{prefix}/max_violation"] == pytest.approx(worst)
        assert metrics[f"{prefix}/dead_experts"] == dead
    assert metrics["routing/tokens_changed"] == pytest.approx(sum(changed) / len(changed))
    assert 0.02 < metrics["routing/tokens_changed"] < 1
    assert ("routing/replayed_max_violation" in metrics) == bool(routing)


@pytest.mark.parametrize("replay", ["off", "r2"])
def test_padding_of_a_steps_micro_batches_is_in_no_figure(replay: str) -> None:
    """The metrics are the same for padded rows and for packed rows. Padding tokens are all equal,
    so if they counted, they would add load to a few experts."""
    routing = {"volatility": True, "replay": replay}
    policies = [moe_policy() for _ in range(2)]
    policies[1].models[0].load_state_dict(policies[0].models[0].state_dict())
    packed, padded = (
        update(updater_for(policy, routing, padded=number == 1), together=True)
        for number, policy in enumerate(policies)
    )
    names = [name for name in packed if name.startswith("routing/")]
    assert len(names) > 8 and packed["routing/volatility"] > 0.01
    assert [padded[name] for name in names] == pytest.approx([packed[n] for n in names], rel=1e-3)


def test_one_mini_batch_has_nothing_to_compare() -> None:
    figures = RoutingMetrics(LAYERS, EXPERTS, CPU, replayed=True)
    assert reduced(figures) == {}


def test_scores_are_kept_of_at_most_512_tokens_a_micro_batch() -> None:
    """The scores of all tokens would take 32 times the memory of the routes. So only the scores of
    tokens at equal distances are kept, and the shift is a mean over these tokens."""
    scores = torch.randn(1300, EXPERTS)
    recording = Recording(keep_scores=True)
    recording.choose(1, scores, top_k(scores))
    assert len(recording.scores[1]) == len(range(0, 1300, 3)) <= 512
    moved = scores + torch.arange(1300)[:, None] % 3  # the scores of the kept tokens do not change
    metrics = RoutingMetrics(1, EXPERTS, CPU, replayed=False)
    observing = Observing(recording.table(), recording.scores, all_real(1300), metrics, None)
    observing.choose(1, moved, top_k(moved))
    assert reduced(metrics, observing)["routing/logit_shift"] == 0.0


def test_recorded_routes_and_scores_go_to_the_host_during_the_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After the last router of a micro-batch, its routes become one table on the host. Otherwise
    the device would keep the routes of all micro-batches until the end of the pass."""
    moved: list[tuple[int, ...]] = []
    monkeypatch.setattr(replay, "to_host", lambda values: moved.append(values.shape) or values)
    scores = torch.randn(LAYERS, TOKENS, EXPERTS)
    recording = Recording(keep_scores=True, num_layers=LAYERS, on_host=True)
    for layer, of_layer in enumerate(scores, 1):
        recording.choose(layer, of_layer, top_k(of_layer))
    assert moved == [(TOKENS, EXPERTS)] * LAYERS + [(LAYERS, TOKENS, TOP_K)]
    recording.table()
    assert len(moved) == LAYERS + 1  # the routes are moved only once
