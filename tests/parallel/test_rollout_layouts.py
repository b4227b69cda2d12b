"""Rollouts by the sharded model: one set of responses on all layouts, log-probs as trained."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest

from gspo_megatron.config.parallel import Layout
from gspo_megatron.rollout.engine import Sampling
from tests.parallel.models import VOCAB_SIZE, odd_moe
from tests.parallel.pool import Pool
from tests.parallel.rollouts import EOS_ID, Response, argmaxes, generate, mismatch, spelled

LAYOUTS = [
    "tp=2",
    "pp=2",
    "dp=2",
    "dp=2,ep=2",
    "cp=2",
    "tp=2,etp=2",
    "pp=2,vpp=2",
    "tp=2,pp=2,ep=2",
]
PER_PROMPT = 3
SAMPLED = Sampling(max_tokens=14, temperature=0.7)
GREEDY = Sampling(max_tokens=14, temperature=0.0)
# fp32 logits of size 10 or so, summed in another order: 1e-6; a wrong position or token: 0.1
TOLERANCE = 1e-5


def prompts(count: int = 5) -> list[list[int]]:
    draw = random.Random(5)
    lengths = [5, 1, 8, 3, 6][:count]
    return [[draw.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in lengths]


def responses(
    pool: Pool,
    layout: str,
    sampling: Sampling,
    per_prompt: int = PER_PROMPT,
    count: int = 5,
    batch_size: int | None = None,
    ddp: dict[str, Any] | None = None,
) -> dict[int, list[Response]]:
    """Sample index -> the response as each rank of a replica returned it."""
    found = pool.run(
        Layout.parse(layout).world_size,
        generate,
        config=odd_moe(layout, ddp=ddp),
        prompts=prompts(count),
        per_prompt=per_prompt,
        sampling=sampling,
        seed=11,
        batch_size=batch_size,
    )
    found.sort(key=lambda pair: (pair[0], pair[1].rank))
    groups = itertools.groupby(found, key=lambda pair: pair[0])
    return {sample: [response for _, response in group] for sample, group in groups}


@pytest.fixture(scope="module")
def of_one_rank(pool: Pool) -> dict[int, list[Response]]:
    return responses(pool, "tp=1", SAMPLED)


def test_responses_of_one_rank_differ_end_and_are_cut_off(
    of_one_rank: dict[int, list[Response]],
) -> None:
    every = [copies[0] for copies in of_one_rank.values()]
    assert sorted(of_one_rank) == list(range(5 * PER_PROMPT))
    assert len({tuple(r.tokens) for r in every}) == len(every)
    assert {r.truncated for r in every} == {True, False}
    assert all((r.tokens[-1] == EOS_ID) != r.truncated for r in every)
    assert all(EOS_ID not in r.tokens[:-1] for r in every)


@pytest.mark.parametrize("layout", [*LAYOUTS, "tp=2,pp=2,ep=2,dp=2"])
def test_sampled_responses_are_those_of_one_rank(
    pool: Pool, of_one_rank: dict[int, list[Response]], layout: str
) -> None:
    found = responses(pool, layout, SAMPLED)
    assert found.keys() == of_one_rank.keys()
    for sample, copies in found.items():
        expected = of_one_rank[sample][0]
        for response in copies:
            assert response.prompt == expected.prompt
            assert response.tokens == expected.tokens
            assert response.truncated == expected.truncated
            assert response.logprobs == pytest.approx(expected.logprobs, abs=TOLERANCE)


@pytest.mark.parametrize("layout", ["tp=1", *LAYOUTS])
def test_greedy_decoding_equals_the_argmax_of_a_full_forward(pool: Pool, layout: str) -> None:
    found = [copies[0] for copies in responses(pool, layout, GREEDY, per_prompt=1).values()]
    sequences = [response.prompt + response.tokens for response in found]
    expected = pool.run(1, argmaxes, config=odd_moe("tp=1"), sequences=sequences)
    for response, likeliest in zip(found, expected, strict=True):
        assert response.tokens == likeliest[len(response.prompt) - 1 : -1]


@pytest.mark.parametrize("layout", ["tp=1", *LAYOUTS])
def test_log_probs_of_the_engine_are_those_of_the_trainer(pool: Pool, layout: str) -> None:
    largest, count = pool.run(
        Layout.parse(layout).world_size,
        mismatch,
        config=odd_moe(layout),
        prompts=prompts(),
        per_prompt=PER_PROMPT,
        sampling=SAMPLED,
        seed=12,
    )
    assert count > 5 * PER_PROMPT
    assert largest <= TOLERANCE


@pytest.mark.parametrize(("layout", "sources"), [("dp=2", 2), ("cp=2", 2), ("tp=2,cp=2,dp=2", 4)])
def test_data_ranks_draw_responses_to_different_prompts(
    pool: Pool, layout: str, sources: int
) -> None:
    found = responses(pool, layout, SAMPLED)
    for sample, copies in found.items():
        assert {r.data_rank for r in copies} == {sample // PER_PROMPT % sources}
    replica = Layout.parse(layout).world_size // sources
    assert {len(copies) for copies in found.values()} == {replica}


OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("tp=1", {"batch_size": 4}),
        ("dp=2,ep=2", {"batch_size": 4}),
        # a data rank without prompts takes part where it holds experts,
        ("dp=4,ep=4", {"count": 1}),
        ("dp=2,etp=2", {"count": 1}),
        # and where ranks still wait for the weights of an update
        ("dp=2", {"count": 1, "ddp": OVERLAP}),
    ],
)
def test_engine_batches_and_ranks_without_prompts_do_not_change_tokens(
    pool: Pool, of_one_rank: dict[int, list[Response]], layout: str, options: dict[str, Any]
) -> None:
    count = options.get("count", 5)
    expected = {s: of_one_rank[s][0].tokens for s in range(count * PER_PROMPT)}
    found = responses(pool, layout, SAMPLED, **options)
    assert {s: copies[0].tokens for s, copies in found.items()} == expected


@pytest.mark.parametrize("layout", ["tp=2,pp=2", "dp=4,ep=4"])
def test_stop_strings_end_the_same_responses(
    pool: Pool, of_one_rank: dict[int, list[Response]], layout: str
) -> None:
    stop = spelled(of_one_rank[0][0].tokens[1:3])
    sampling = replace(SAMPLED, stop=(stop,))
    for sample, copies in responses(pool, layout, sampling, count=3).items():
        whole = spelled(of_one_rank[sample][0].tokens)
        expected = whole[: whole.index(stop) + 2] if stop in whole else whole
        assert {spelled(r.tokens) for r in copies} == {expected}
