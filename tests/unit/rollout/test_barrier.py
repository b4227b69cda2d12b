"""The barrier at which the episodes of a rank wait for each other's turns."""

from __future__ import annotations

import asyncio
import resource
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gspo_megatron.environments.episode import EpisodeLimits, EpisodeRunner, TurnRequest
from gspo_megatron.rollout.megatron.barrier import Barrier
from gspo_megatron.rollout.megatron.rollouts import MegatronRollouts
from gspo_megatron.types import RolloutBatch
from tests.unit.environments.characters import character_tokenizer


def turns(*ids: list[int]) -> RolloutBatch:
    """The turns of one call of the engine. Each prompt has one token."""
    count = torch.arange(len(ids))
    return RolloutBatch(
        tokens=torch.tensor([n for turn in ids for n in (9, *turn)]),
        prompt_lengths=torch.ones(len(ids), dtype=torch.long),
        response_lengths=torch.tensor([len(turn) for turn in ids]),
        rollout_logprobs=torch.arange(sum(map(len, ids))).float(),
        truncated=torch.zeros(len(ids), dtype=torch.bool),
        sample_index=count,
        group_index=count,
    )


def test_an_episode_that_gives_up_a_turn_is_waited_for() -> None:
    """The client gives up one request and sends another one later."""

    async def plain(barrier: Barrier) -> Any:
        return [
            turn for n in range(2) for turn in await barrier.generate(TurnRequest((1,), n, 4), [1])
        ]

    async def impatient(barrier: Barrier) -> Any:
        given_up = asyncio.create_task(barrier.generate(TurnRequest((2,), 0, 4), [0]))
        await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.sleep(0.05)
        return await barrier.generate(TurnRequest((3,), 0, 4), [0])

    async def run() -> Any:
        barrier = Barrier(asyncio.get_running_loop())
        barrier.start({n: play(barrier) for n, play in enumerate((impatient, plain))})
        requests = await barrier.requests()
        assert (requests.prompts, requests.group_index) == ([(3,), (1,)], [0, 1])
        barrier.answer(turns([5, 6], [7]))
        assert (await barrier.requests()).group_index == [1]
        barrier.answer(turns([8]))
        assert not (await barrier.requests()).prompts
        return barrier.played()

    found = [
        (turn.token_ids.tolist(), turn.logprobs.tolist(), turn.place) for turn in asyncio.run(run())
    ]
    assert found == [([5, 6], [0.0, 1.0], (0, 0)), ([7], [2.0], (0, 1)), ([8], [0.0], (1, 0))]


def test_a_turn_that_is_given_up_while_the_engine_generates_it_is_dropped() -> None:
    """The event loop runs for a moment after `requests` has ended, and may then cancel a call."""
    asked: list[asyncio.Task[Any]] = []

    async def impatient(barrier: Barrier) -> Any:
        asked.append(asyncio.create_task(barrier.generate(TurnRequest((2,), 0, 4), [0])))
        await asyncio.wait(asked)
        return await barrier.generate(TurnRequest((3,), 0, 4), [0])

    async def run() -> Any:
        barrier = Barrier(asyncio.get_running_loop())
        barrier.start({0: impatient(barrier), 1: barrier.generate(TurnRequest((1,), 0, 4), [1])})
        assert (await barrier.requests()).prompts == [(2,), (1,)]
        asked[0].cancel()
        barrier.answer(turns([5], [6]))
        assert (await barrier.requests()).prompts == [(3,)]
        barrier.answer(turns([7]))
        assert not (await barrier.requests()).prompts
        return barrier.played()

    assert [turn.token_ids.tolist() for turn in asyncio.run(run())] == [[7], [6]]


def test_all_responses_to_a_prompt_wait_together() -> None:
    async def run() -> Any:
        barrier = Barrier(asyncio.get_running_loop())
        ask = TurnRequest((1,), 0, 4)
        barrier.start({n: barrier.generate(ask, [n, n + 1]) for n in (2, 0)})
        requests = await barrier.requests()
        assert (requests.group_index, requests.responses_per_prompt) == ([0, 1], 2)
        barrier.answer(turns([3], [4], [5], [6]))
        assert not (await barrier.requests()).prompts
        return barrier.played()

    found = asyncio.run(run())
    # in the order in which the prompts were started
    assert [turn.token_ids.tolist() for turn in found] == [[5], [6], [3], [4]]
    assert found[0].token_ids.dtype == np.int32


@pytest.mark.usefixtures("one_rank")
def test_many_episodes_may_have_open_files_and_wait_in_threads(tmp_path: Path) -> None:
    """Each program of an agent takes several files. By default, at most 32 threads would run."""
    nothing: Any = None  # no episode is played
    limits = EpisodeLimits(turns=3, response_tokens=9)
    runner = EpisodeRunner(nothing, character_tokenizer(tmp_path), limits)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 500), hard))
    try:
        episodes = MegatronRollouts(nothing, runner, torch.device("cpu"))
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    together = threading.Barrier(40)

    async def wait() -> list[int]:
        return await asyncio.gather(*(asyncio.to_thread(together.wait, 20) for _ in range(40)))

    assert sorted(episodes.loop.run_until_complete(wait())) == [*range(40)]
