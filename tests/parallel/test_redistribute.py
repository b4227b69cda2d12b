"""Whole sequences move, with their log-probs and routes, to the ranks that train on them. All ranks
get the rewards."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from gspo_megatron.batching.plan import MiniBatch
from gspo_megatron.batching.redistribute import gather_index, redistribute
from gspo_megatron.config import Config, resolve_parallel
from gspo_megatron.config.parallel import Layout
from gspo_megatron.platform.groups import set_up_model_parallel
from gspo_megatron.types import RolloutBatch
from tests.parallel.models import odd_moe
from tests.parallel.pool import Pool


def sequence(number: int) -> tuple[list[int], list[float], float]:
    """The tokens, log-probs and reward of a sequence. Every rank can compute them."""
    draw = random.Random(number)
    length = draw.randint(2, 30)
    response = draw.randint(1, length - 1)
    tokens = [draw.randrange(1000) for _ in range(length)]
    # multiples of 1/64 are exact in float32
    logprobs = [-draw.randrange(1000) / 64 for _ in range(response)]
    return tokens, logprobs, draw.randrange(-200, 200) / 64


def move(config: Config, sources: list[int], destinations: list[int]) -> None:
    """Send sequence n from data-parallel rank sources[n] to destinations[n]. Check that this rank
    receives exactly its own sequences, complete."""
    set_up_model_parallel(resolve_parallel(config, dist.get_world_size()), 1)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    held = [n for n, source in enumerate(sources) if source == group.rank()]
    random.Random(3).shuffle(held)  # an engine may return sequences in any order
    batch, rewards = _batch(held)
    index = gather_index(batch, rewards, group)
    # Token advantages move in the same way. Here they are twice the log-probs, so that the two
    # cannot be confused.
    size = parallel_state.get_data_parallel_world_size()
    shares = [[n for n, place in enumerate(destinations) if place == rank] for rank in range(size)]
    plan = MiniBatch(tuple((tuple(each),) for each in shares), len(destinations), 0)
    received = redistribute(
        batch,
        index,
        [plan],
        group,
        context_parallel_size=config.parallel.context_parallel_size,
        token_advantages=2 * batch.rollout_logprobs,
    )
    contents = [sequence(n) for n in range(len(sources))]
    assert list(index.source) == sources
    assert list(index.lengths) == [len(tokens) for tokens, _, _ in contents]
    assert index.rewards.tolist() == [reward for _, _, reward in contents]
    assert list(index.groups) == [n // 2 for n in range(len(sources))]

    rank = parallel_state.get_data_parallel_rank()
    mine = {n for n, destination in enumerate(destinations) if destination == rank}
    assert received.tokens.keys() == received.routes.keys() == received.offsets.keys() == mine
    for number in mine:
        tokens, logprobs, _ = contents[number]
        assert received.tokens[number].tolist() == tokens
        assert torch.equal(received.routes[number], _routes(received.tokens[number]))
        start = received.offsets[number]
        assert received.rollout_logprobs[start : start + len(logprobs)].tolist() == logprobs
    assert len(received.rollout_logprobs) == sum(len(contents[n][1]) for n in mine)
    assert torch.equal(received.token_advantages, 2 * received.rollout_logprobs)


def _routes(tokens: torch.Tensor) -> torch.Tensor:
    """The routes [tokens, 3 layers, 2 experts] of a model with more than 256 experts."""
    return (tokens[:, None, None] + torch.arange(6).view(3, 2)).to(torch.int16)


def _batch(numbers: list[int]) -> tuple[RolloutBatch, torch.Tensor]:
    contents = [sequence(n) for n in numbers]
    responses = torch.tensor([len(p) for _, p, _ in contents], dtype=torch.long)
    lengths = torch.tensor([len(t) for t, _, _ in contents], dtype=torch.long)
    tokens = torch.tensor([x for t, _, _ in contents for x in t], dtype=torch.long)
    batch = RolloutBatch(
        tokens=tokens,
        prompt_lengths=lengths - responses,
        response_lengths=responses,
        rollout_logprobs=torch.tensor([x for _, p, _ in contents for x in p], dtype=torch.float32),
        truncated=torch.zeros(len(numbers), dtype=torch.bool),
        sample_index=torch.tensor(numbers, dtype=torch.long),
        group_index=torch.tensor(numbers, dtype=torch.long) // 2,
        routes=_routes(tokens),
    )
    return batch, torch.tensor([r for _, _, r in contents], dtype=torch.float64)


@pytest.mark.parametrize(
    "layout", ["tp=1", "dp=2", "dp=3", "dp=4", "cp=2", "dp=2,cp=2", "tp=2,dp=2"]
)
def test_every_sequence_arrives_whole_where_it_is_trained_on(pool: Pool, layout: str) -> None:
    sizes = Layout.parse(layout)
    data_parallel = sizes.dp or 1
    draw = random.Random(layout)
    sources = [draw.randrange(data_parallel * sizes.cp) for _ in range(17)]
    destinations = [draw.randrange(data_parallel) for _ in range(17)]
    pool.each(odd_moe(layout), move, sources=sources, destinations=destinations)


def test_ranks_may_have_nothing_to_send_or_to_receive(pool: Pool) -> None:
    pool.each(odd_moe("dp=3"), move, sources=[1, 1, 1], destinations=[2, 2, 0])
