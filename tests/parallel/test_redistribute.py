"""Sequences travel whole, with their log-probs and routes, to the ranks that train on them; rewards
to all."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from gspo_megatron.batching.redistribute import gather_index, redistribute
from gspo_megatron.config import Config, resolve_parallel
from gspo_megatron.config.parallel import Layout
from gspo_megatron.platform.groups import set_up_model_parallel
from gspo_megatron.types import RolloutBatch
from tests.parallel.models import odd_moe
from tests.parallel.pool import Pool


def sequence(number: int) -> tuple[list[int], list[float], float]:
    """Tokens, the response's log-probs and the reward of a sequence, as any rank knows them."""
    draw = random.Random(number)
    length = draw.randint(2, 30)
    response = draw.randint(1, length - 1)
    tokens = [draw.randrange(1000) for _ in range(length)]
    # multiples of 1/64 are exact in float32
    logprobs = [-draw.randrange(1000) / 64 for _ in range(response)]
    return tokens, logprobs, draw.randrange(-200, 200) / 64


def move(config: Config, sources: list[int], destinations: list[int]) -> dict[str, Any]:
    """Send sequence n from data rank sources[n] to the data-parallel rank destinations[n]. Returns
    what this rank received."""
    set_up_model_parallel(resolve_parallel(config, dist.get_world_size()), 1)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    mine = [n for n, source in enumerate(sources) if source == group.rank()]
    random.Random(3).shuffle(mine)  # an engine may return them in any order
    batch, rewards = _batch(mine)
    index = gather_index(batch, rewards, group)
    # token advantages travel as the log-probs do: twice them, so that nothing else passes for them
    received = redistribute(
        batch,
        index,
        destinations,
        group,
        context_parallel_size=config.parallel.context_parallel_size,
        token_advantages=2 * batch.rollout_logprobs,
    )
    assert torch.equal(received.token_advantages, 2 * received.rollout_logprobs)
    for number, tokens in received.tokens.items():
        assert torch.equal(received.routes[number], _routes(tokens))
    contents = [sequence(n) for n in range(len(sources))]
    assert list(index.source) == sources
    assert list(index.lengths) == [len(tokens) for tokens, _, _ in contents]
    assert index.rewards.tolist() == [reward for _, _, reward in contents]
    assert list(index.groups) == [n // 2 for n in range(len(sources))]
    return {
        "data_parallel_rank": parallel_state.get_data_parallel_rank(),
        "tokens": {n: tokens.tolist() for n, tokens in received.tokens.items()},
        "logprobs": {
            n: received.rollout_logprobs[start : start + index.response_lengths[n]].tolist()
            for n, start in received.offsets.items()
        },
        "num_logprobs": len(received.rollout_logprobs),
    }


def _routes(tokens: torch.Tensor) -> torch.Tensor:
    """[tokens, 3 layers, 2 experts] of a model with more than 256 experts."""
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


def assert_whole(rank: dict[str, Any], numbers: Sequence[int]) -> None:
    """The rank holds exactly the sequences `numbers`."""
    contents = {n: sequence(n) for n in numbers}
    assert rank["tokens"] == {n: tokens for n, (tokens, _, _) in contents.items()}
    assert rank["logprobs"] == {n: logprobs for n, (_, logprobs, _) in contents.items()}
    assert rank["num_logprobs"] == sum(len(logprobs) for _, logprobs, _ in contents.values())


@pytest.mark.parametrize(
    "layout", ["tp=1", "dp=2", "dp=3", "dp=4", "cp=2", "dp=2,cp=2", "tp=2,dp=2"]
)
def test_every_sequence_arrives_whole_where_it_is_trained_on(pool: Pool, layout: str) -> None:
    sizes = Layout.parse(layout)
    data_parallel = sizes.dp or 1
    draw = random.Random(layout)
    sources = [draw.randrange(data_parallel * sizes.cp) for _ in range(17)]
    destinations = [draw.randrange(data_parallel) for _ in range(17)]
    for rank in pool.each(odd_moe(layout), move, sources=sources, destinations=destinations):
        mine = [n for n, d in enumerate(destinations) if d == rank["data_parallel_rank"]]
        assert_whole(rank, mine)


def test_ranks_may_have_nothing_to_send_or_to_receive(pool: Pool) -> None:
    received = pool.each(odd_moe("dp=3"), move, sources=[1, 1, 1], destinations=[2, 2, 0])
    for rank, numbers in zip(received, [[2], [], [0, 1]], strict=True):
        assert_whole(rank, numbers)
