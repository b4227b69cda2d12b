"""Drawing tokens: frequencies against the softmax, truncation against plain Python."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gspo_megatron.rollout.engine import Sampling
from gspo_megatron.rollout.sampling import draw, uniforms

LOGITS = [0.3, -1.2, 2.1, 0.0, 1.7, -3.0, 0.9]
DRAWS = 20_000
# 0.999 quantiles of the chi-square distribution by degrees of freedom
CHI_SQUARE = {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47, 5: 20.52, 6: 22.46}


def softmax(logits: list[float], temperature: float) -> list[float]:
    weights = [math.exp(x / temperature) for x in logits]
    return [w / sum(weights) for w in weights]


def kept_by_top_k(probabilities: list[float], k: int) -> set[int]:
    order = sorted(range(len(probabilities)), key=lambda i: -probabilities[i])
    return set(order[:k])


def kept_by_top_p(probabilities: list[float], p: float) -> set[int]:
    """The fewest of the likeliest tokens whose probabilities reach p."""
    kept: set[int] = set()
    for token in sorted(range(len(probabilities)), key=lambda i: -probabilities[i]):
        if sum(probabilities[i] for i in kept) >= p:
            break
        kept.add(token)
    return kept


def draw_many(sampling: Sampling, seed: int = 1) -> tuple[Tensor, Tensor]:
    uniform = uniforms(seed, torch.arange(DRAWS), 1)[:, 0]
    return draw(torch.tensor([LOGITS]).expand(DRAWS, -1), sampling, uniform)


def options(**values: Any) -> Sampling:
    return Sampling(max_tokens=1, **values)


Keep = Callable[[list[float]], set[int]]
CASES: list[tuple[dict[str, Any], Keep]] = [
    ({}, lambda p: set(range(len(p)))),
    ({"temperature": 0.7}, lambda p: set(range(len(p)))),
    ({"temperature": 2.5}, lambda p: set(range(len(p)))),
    ({"top_k": 3}, lambda p: kept_by_top_k(p, 3)),
    ({"top_k": 2, "temperature": 1.4}, lambda p: kept_by_top_k(p, 2)),
    ({"top_k": 7}, lambda p: set(range(len(p)))),
    ({"top_k": 100}, lambda p: set(range(len(p)))),
    ({"top_p": 0.8}, lambda p: kept_by_top_p(p, 0.8)),
    ({"top_p": 0.5, "temperature": 1.7}, lambda p: kept_by_top_p(p, 0.5)),
    ({"top_p": 0.999}, lambda p: kept_by_top_p(p, 0.999)),
]


@pytest.mark.parametrize(("values", "keep"), CASES, ids=[str(case[0]) for case in CASES])
def test_frequencies_are_those_of_the_truncated_softmax(values: dict[str, Any], keep: Keep) -> None:
    tokens, logprobs = draw_many(options(**values))
    probabilities = softmax(LOGITS, values.get("temperature", 1.0))
    kept = keep(probabilities)
    counts = torch.bincount(tokens, minlength=len(LOGITS)).tolist()
    assert {token for token, count in enumerate(counts) if count} <= kept
    total = sum(probabilities[token] for token in kept)
    expected = {token: DRAWS * probabilities[token] / total for token in kept}
    assert min(expected.values()) > 5  # where the chi-square approximation holds
    statistic = sum((counts[t] - e) ** 2 / e for t, e in expected.items())
    assert statistic < CHI_SQUARE[len(kept) - 1]
    # the log-prob is the whole softmax's, whatever truncation leaves out
    for token, logprob in zip(tokens[:50].tolist(), logprobs[:50].tolist(), strict=True):
        assert logprob == pytest.approx(math.log(probabilities[token]), abs=1e-6)


@pytest.mark.parametrize("values", [{"top_p": 1e-6}, {"top_k": 1}, {"top_k": 1, "top_p": 0.1}])
def test_the_likeliest_token_always_stays(values: dict[str, Any]) -> None:
    tokens, _ = draw_many(options(**values))
    assert tokens.unique().tolist() == [LOGITS.index(max(LOGITS))]


def test_top_k_and_top_p_both_hold() -> None:
    probabilities = softmax(LOGITS, 1.0)
    for k, p in ((3, 0.95), (5, 0.6), (2, 0.3)):
        tokens, _ = draw_many(options(top_k=k, top_p=p))
        allowed = kept_by_top_k(probabilities, k) & kept_by_top_p(probabilities, p)
        assert set(tokens.tolist()) <= allowed


def test_top_p_is_a_share_of_what_top_k_left() -> None:
    # as transformers and vLLM combine them
    probabilities = softmax(LOGITS, 1.0)
    top_k = kept_by_top_k(probabilities, 3)
    left = [p if i in top_k else 0.0 for i, p in enumerate(probabilities)]
    expected = kept_by_top_p([p / sum(left) for p in left], 0.8)
    assert len(expected) < 3
    tokens, _ = draw_many(options(top_k=3, top_p=0.8))
    assert set(tokens.tolist()) == expected


@pytest.mark.parametrize("seed", range(3))
def test_tokens_invert_the_cumulative_distribution(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = 2.0 * torch.randn(40, 53, generator=generator)
    uniform = torch.rand(40, generator=generator, dtype=torch.float64)
    tokens, logprobs = draw(logits, options(temperature=0.9), uniform)
    compared = 0
    for row, u, token, logprob in zip(logits.tolist(), uniform.tolist(), tokens, logprobs):
        probabilities = softmax(row, 0.9)
        edges = [sum(probabilities[: i + 1]) for i in range(len(row))]
        expected = next(i for i, edge in enumerate(edges) if edge > u)
        assert float(logprob) == pytest.approx(math.log(probabilities[int(token)]), abs=1e-5)
        if min(abs(edge - u) for edge in edges) > 1e-6:  # else fp32 rounding decides
            assert int(token) == expected
            compared += 1
    assert compared > 35


def test_greedy_takes_the_largest_logit_and_its_logprob_at_temperature_one() -> None:
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(12, 31, generator=generator)
    uniform = torch.rand(12, generator=generator, dtype=torch.float64)
    tokens, logprobs = draw(logits, options(temperature=0.0), uniform)
    assert torch.equal(tokens, logits.argmax(-1))
    expected = torch.log_softmax(logits.double(), -1).amax(-1)
    torch.testing.assert_close(logprobs.double(), expected, atol=1e-6, rtol=0.0)


def test_a_token_without_probability_is_never_drawn() -> None:
    # at both ends of the vocabulary and at both ends of the unit interval
    logits = torch.tensor([[-math.inf, 1.0, -math.inf, 1.0, -math.inf]])
    for u, expected in ((2.0**-54, 1), (0.25, 1), (0.75, 3), (1.0 - 2.0**-53, 3)):
        uniform = torch.tensor([u], dtype=torch.float64)
        for values in ({}, {"top_k": 3}, {"top_p": 0.999}):
            tokens, _ = draw(logits, options(**values), uniform)
            assert tokens.tolist() == [expected]


def test_logits_are_left_as_they_were() -> None:
    logits = torch.tensor([LOGITS])
    before = logits.clone()
    draw(logits, options(temperature=0.5, top_k=2, top_p=0.5), torch.tensor([0.3]).double())
    assert torch.equal(logits, before)
