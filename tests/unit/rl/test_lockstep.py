"""Where episodes of a rank wait for their next turn."""

from __future__ import annotations

import asyncio
from typing import Any

import torch

from gspo_megatron.environments.episode import Asked, Written
from gspo_megatron.rl.lockstep import _Room
from gspo_megatron.types import RolloutBatch


def drawn(turns: list[list[int]]) -> RolloutBatch:
    """A call of the engine: a prompt of one token and a turn for each."""
    count = torch.arange(len(turns))
    return RolloutBatch(
        tokens=torch.tensor([n for turn in turns for n in (9, *turn)]),
        prompt_lengths=torch.ones(len(turns), dtype=torch.long),
        response_lengths=torch.tensor([len(turn) for turn in turns]),
        rollout_logprobs=torch.zeros(sum(map(len, turns))),
        truncated=torch.zeros(len(turns), dtype=torch.bool),
        sample_index=count,
        group_index=count,
    )


def test_an_episode_that_gives_up_a_turn_is_waited_for() -> None:
    """Its client is gone, and asks for something else later."""

    async def plain(room: _Room) -> Any:
        return [await room.ask(1, Asked((1,), turn, 4)) for turn in range(2)]

    async def impatient(room: _Room) -> Any:
        given_up = asyncio.create_task(room.ask(0, Asked((2,), 0, 4)))
        await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.sleep(0.05)
        return [await room.ask(0, Asked((3,), 0, 4))]

    async def run() -> list[list[Written]]:
        room = _Room()
        running: list[Any] = [asyncio.create_task(play(room)) for play in (impatient, plain)]
        await room.until_all_wait(running)
        asked = {number: turn.token_ids for number, (turn, _) in room.waiting.items()}
        assert asked == {0: (3,), 1: (1,)}
        room.answer(drawn([[5, 6], [7]]), 0)
        await room.until_all_wait(running)
        assert [*room.waiting] == [1]
        room.answer(drawn([[8]]), 1)
        return await asyncio.gather(*running)

    first, second = asyncio.run(run())
    assert [(turn.token_ids, turn.source) for turn in first] == [([5, 6], (0, 0))]
    assert [(turn.token_ids, turn.source) for turn in second] == [([7], (0, 1)), ([8], (1, 0))]
