"""Noise in the top k of real routers, and in the rollout engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
from torch import Tensor

from gspo_megatron.config import check_config
from gspo_megatron.errors import ConfigError
from gspo_megatron.models.build import Policy
from gspo_megatron.routing.hooks import RouterHook, attach_hooks
from gspo_megatron.routing.noise import noisy_routers, normal
from gspo_megatron.types import RolloutBatch
from tests.unit.models.one_rank import (
    one_rank_groups,
    tiny_config,
    tiny_policy,
)
from tests.unit.rollout import test_megatron_engine as plain_rollouts
from tests.unit.routing.test_gates import (
    EXPERTS,
    ROUTERS,
    TOP_K,
    best_experts,
    routed_by,
    selection_scores,
)

TOKENS = 64


def numbers(layer: int, experts: int) -> Tensor:
    generator = torch.Generator().manual_seed(layer)
    return torch.rand((TOKENS, experts), dtype=torch.float64, generator=generator)


@pytest.fixture
def logits() -> Tensor:
    return torch.randn((TOKENS, EXPERTS), generator=torch.Generator().manual_seed(7))


def route(logits: Tensor, router: dict[str, Any], layer: int = 3) -> Tensor:
    """The routes [tokens, experts] bool."""
    hook = RouterHook(layer)
    _, chosen = routed_by(hook, logits.clone(), router)
    return chosen


def test_uniform_numbers_become_normal_ones() -> None:
    count = 20_000
    values = normal((torch.arange(count, dtype=torch.float64) + 0.5) / count)
    assert abs(float(values.mean())) < 1e-12
    assert float(values.std()) == pytest.approx(1.0, abs=1e-3)
    below = float((values < -1.0).double().mean())
    assert below == pytest.approx(0.158655, abs=1e-4)


@pytest.mark.parametrize("name", ROUTERS)
def test_the_experts_are_those_of_the_noisy_scores(name: str, logits: Tensor) -> None:
    std, router = 0.3, ROUTERS[name]
    with torch.no_grad(), noisy_routers(std, numbers, record=True) as experts:
        chosen = route(logits, router)
    noisy = selection_scores(logits, router) + std * normal(numbers(3, EXPERTS)).float()
    expected = [best_experts(row, router) for row in noisy.tolist()]
    assert [row.nonzero()[:, 0].tolist() for row in chosen] == expected
    assert not torch.equal(chosen, route(logits, router)), "no token went elsewhere"
    assert experts[3].sort().values.tolist() == expected


def test_nothing_is_recorded_unless_wanted_and_nothing_lasts(logits: Tensor) -> None:
    with torch.no_grad(), noisy_routers(0.3, numbers, record=False) as experts:
        route(logits, {})
    assert not experts
    assert torch.equal(route(logits, {}), topk_routing_with_score_function(logits, TOP_K)[1])


def test_a_pass_with_gradients_is_no_rollout(logits: Tensor) -> None:
    with noisy_routers(0.3, numbers, record=False), pytest.raises(AssertionError, match="rollouts"):
        route(logits, {})


@pytest.mark.parametrize(
    ("overrides", "wrong"),
    [
        ({"num_moe_experts": None}, "routing.rollout_noise = 0.1: the model has no experts"),
        ({"moe_router_fusion": True}, "a fused router does not call the hook"),
    ],
)
def test_a_model_whose_routers_cannot_be_noisy_is_refused(
    overrides: dict[str, Any], wrong: str
) -> None:
    config = tiny_config(model={"megatron": overrides}, routing={"rollout_noise": 0.1})
    with pytest.raises(ConfigError, match=wrong):
        check_config(config, 1)


@pytest.fixture(scope="module")
def policy() -> Iterator[Policy]:
    with one_rank_groups():
        policy = tiny_policy(model={"megatron": {"init_method_std": 0.15}})
        attach_hooks(policy.models)
        yield policy


def generate(policy: Policy, std: float, **options: Any) -> RolloutBatch:
    options = {"per_prompt": 3, "record_routes": True, "router_noise": std} | options
    return plain_rollouts.generate(policy, plain_rollouts.PROMPTS[:4], **options)


def test_noise_depends_on_seed_sample_and_position_alone(policy: Policy) -> None:
    whole, again = generate(policy, 0.5), generate(policy, 0.5)
    assert torch.equal(whole.routes, again.routes) and torch.equal(whole.tokens, again.tokens)
    # with 4 rows, the 3 responses of a group cannot always start together; with 6 rows they can
    for rows in (4, 6):
        parts = generate(policy, 0.5, batch_size=rows)
        assert torch.equal(whole.tokens, parts.tokens)
        assert torch.equal(whole.routes, parts.routes)
    assert not torch.equal(whole.routes, generate(policy, 0.5, seed=6).routes)


def test_the_routes_and_log_probs_are_those_of_the_noisy_routers(policy: Policy) -> None:
    """The prompts are the same in both rollouts, so their routes can be compared."""
    noisy, plain = generate(policy, 0.05), generate(policy, 0.0)
    length = (plain.prompt_lengths + plain.response_lengths).cumsum(0)
    starts = length - plain.prompt_lengths - plain.response_lengths
    prompts = torch.cat(
        [torch.arange(s, s + n) for s, n in zip(starts.tolist(), plain.prompt_lengths.tolist())]
    )
    assert torch.equal(noisy.tokens[prompts], plain.tokens[prompts])
    changed = (noisy.routes[prompts].sort().values != plain.routes[prompts].sort().values).any(-1)
    assert 0.0 < float(changed.double().mean()) < 0.5
    # The first token of each response depends on the noise of the prompt alone.
    first = plain.response_lengths.cumsum(0) - plain.response_lengths
    assert not torch.equal(noisy.rollout_logprobs[first], plain.rollout_logprobs[first])


def test_greedy_answers_are_the_policys_own(policy: Policy) -> None:
    noisy, plain = (generate(policy, std, temperature=0.0) for std in (0.5, 0.0))
    assert torch.equal(noisy.tokens, plain.tokens) and torch.equal(noisy.routes, plain.routes)
    assert torch.equal(noisy.rollout_logprobs, plain.rollout_logprobs)
