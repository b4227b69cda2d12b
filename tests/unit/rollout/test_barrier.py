"""The barrier at which the episodes of a rank wait for each other's turns."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gspo_megatron.environments.episode import (
    Client,
    EpisodeLimits,
    EpisodeRunner,
    Trajectory,
    TurnRequest,
)
from gspo_megatron.rollout.engine import Requests, Sampling
from gspo_megatron.rollout.megatron.barrier import Barrier, MegatronTurn, turns_of
from gspo_megatron.rollout.megatron.rollouts import MegatronRollouts
from gspo_megatron.types import Prompt, RolloutBatch
from tests.unit.environments.characters import character_tokenizer


def turns(number: int, *ids: list[int]) -> list[MegatronTurn]:
    """The turns of one call of the engine. Each prompt has one token."""
    count = torch.arange(len(ids))
    batch = RolloutBatch(
        tokens=torch.tensor([n for turn in ids for n in (9, *turn)]),
        prompt_lengths=torch.ones(len(ids), dtype=torch.long),
        response_lengths=torch.tensor([len(turn) for turn in ids]),
        rollout_logprobs=torch.arange(sum(map(len, ids))).float(),
        truncated=torch.zeros(len(ids), dtype=torch.bool),
        sample_index=count,
        group_index=count,
    )
    return turns_of(batch, number)


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

    async def run() -> list[list[MegatronTurn]]:
        barrier = Barrier()
        plays = enumerate((impatient, plain))
        running: Any = {n: asyncio.create_task(play(barrier)) for n, play in plays}
        await barrier.until_all_wait(running)
        asked = {number: call.asked.token_ids for number, call in barrier.waiting.items()}
        assert asked == {0: (3,), 1: (1,)}
        barrier.answer(turns(0, [5, 6], [7]))
        await barrier.until_all_wait(running)
        assert [*barrier.waiting] == [1]
        barrier.answer(turns(1, [8]))
        return await asyncio.gather(*running.values())

    first, second = asyncio.run(run())
    assert [(turn.token_ids.tolist(), turn.place) for turn in first] == [([5, 6], (0, 0))]
    found = [(turn.token_ids.tolist(), turn.logprobs.tolist(), turn.place) for turn in second]
    assert found == [([7], [2.0], (0, 1)), ([8], [0.0], (1, 0))]


def test_all_responses_to_a_prompt_wait_together() -> None:
    async def run() -> Any:
        barrier = Barrier()
        ask = TurnRequest((1,), 0, 4)
        calls = {n: asyncio.create_task(barrier.generate(ask, [n, n + 1])) for n in (2, 0)}
        await barrier.until_all_wait(calls)
        barrier.answer(turns(0, [3], [4], [5], [6]))
        return await asyncio.gather(*calls.values())

    later, first = asyncio.run(run())
    assert [turn.token_ids.tolist() for turn in (*first, *later)] == [[3], [4], [5], [6]]
    assert first[0].token_ids.dtype == np.int32


class Twice:
    """An environment with two turns and a text between them."""

    async def rollout(self, client: Client, task: Prompt) -> Trajectory:
        await client.generate()
        await client.generate(text="x")
        return Trajectory(reward=1.0)


class Engine:
    """An engine that records the seeds of its calls. Each turn is one token."""

    def __init__(self) -> None:
        self.seeds: list[int] = []

    def generate(self, requests: Requests, sampling: Sampling, seed: int) -> RolloutBatch:
        self.seeds.append(seed)
        count = len(requests.sample_indices())
        prompts = [ids for ids in requests.prompts for _ in range(requests.responses_per_prompt)]
        lengths = torch.ones(count, dtype=torch.long)
        return RolloutBatch(
            tokens=torch.tensor([n for ids in prompts for n in (*ids, 5)]),
            prompt_lengths=torch.tensor([len(ids) for ids in prompts]),
            response_lengths=lengths,
            rollout_logprobs=torch.zeros(count),
            truncated=torch.zeros(count, dtype=torch.bool),
            sample_index=torch.tensor(requests.sample_indices()),
            group_index=lengths * 0,
        )


@pytest.mark.usefixtures("one_rank")
def test_each_turn_of_an_episode_has_random_numbers_of_its_own(tmp_path: Path) -> None:
    engine: Any = Engine()
    tokenizer = character_tokenizer(tmp_path)
    runner = EpisodeRunner(Twice(), tokenizer, EpisodeLimits(turns=3, response_tokens=9))
    episodes = MegatronRollouts(engine, runner, torch.device("cpu"))
    task = Prompt("a", None, "f:1", token_ids=(9,))
    generated = episodes.generate({0: task}, 2, Sampling(9), seed=7)
    assert generated.group is not None
    # two turns of one token, and a token in between
    assert generated.group.response_lengths.tolist() == [3, 3]
    assert engine.seeds[0] == 7 and len(set(engine.seeds)) == 2
