"""Sequences travel whole, with their log-probs and routes, to the ranks that train on them; rewards
to all."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from gspo_megatron.config.parallel import Layout
from tests.parallel.models import odd_moe
from tests.parallel.pool import Pool
from tests.parallel.redistributions import move, sequence

SEED = 3


def exchanged(
    pool: Pool, layout: str, sources: Sequence[int], destinations: Sequence[int]
) -> list[dict[str, Any]]:
    """What each rank received, after a look at what every rank must know."""
    received = pool.run(
        Layout.parse(layout).world_size,
        move,
        config=odd_moe(layout),
        seed=SEED,
        sources=list(sources),
        destinations=list(destinations),
    )
    lengths = [len(sequence(SEED, n)[0]) for n in range(len(sources))]
    for rank in received:
        assert rank["source"] == list(sources)
        assert rank["lengths"] == lengths
        assert rank["rewards"] == [sequence(SEED, n)[2] for n in range(len(sources))]
        assert rank["groups"] == [n // 2 for n in range(len(sources))]
    return received


def assert_whole(rank: dict[str, Any], numbers: set[int]) -> None:
    """The rank holds exactly the sequences `numbers`."""
    for column in ("tokens", "logprobs"):
        assert set(rank[column]) == numbers
    for number in numbers:
        tokens, logprobs, _ = sequence(SEED, number)
        assert rank["tokens"][number] == tokens
        assert rank["logprobs"][number] == logprobs
    assert rank["num_logprobs"] == sum(len(sequence(SEED, n)[1]) for n in numbers)


@pytest.mark.parametrize(
    "layout", ["tp=1", "dp=2", "dp=3", "dp=4", "cp=2", "dp=2,cp=2", "tp=2,dp=2"]
)
def test_every_sequence_arrives_whole_where_it_is_trained_on(pool: Pool, layout: str) -> None:
    sizes = Layout.parse(layout)
    data_parallel = sizes.dp or 1
    draw = random.Random(layout)
    sources = [draw.randrange(data_parallel * sizes.cp) for _ in range(17)]
    destinations = [draw.randrange(data_parallel) for _ in range(17)]
    for rank in exchanged(pool, layout, sources, destinations):
        mine = {n for n, d in enumerate(destinations) if d == rank["data_parallel_rank"]}
        assert_whole(rank, mine)


def test_ranks_may_have_nothing_to_send_or_to_receive(pool: Pool) -> None:
    received = exchanged(pool, "dp=3", sources=[1, 1, 1], destinations=[2, 2, 0])
    for rank, numbers in zip(received, [{2}, set(), {0, 1}], strict=True):
        assert_whole(rank, numbers)
