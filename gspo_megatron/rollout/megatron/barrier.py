"""The turns of episodes of one rank, brought together for the engine: it generates a turn of every
episode at a time.

`Barrier` is where the episodes wait. The functions below say which turn of the engine's batch is
which, and join the experts that this rank recorded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gspo_megatron.environments.episode import TurnRequest
from gspo_megatron.environments.transcript import joined_routes
from gspo_megatron.process.heartbeat import heartbeat
from gspo_megatron.rollout.episodes import Played
from gspo_megatron.types import RolloutBatch

# Where the turns of a branch are: the round and the row of each. A number instead: so many tokens
# without routes, of an episode that had no turn.
Places = Sequence[list[tuple[int, int]] | int]


@dataclass(eq=False)
class MegatronTurn:
    """A turn that the engine of this rank generated: see `rollout.episodes.Response`."""

    token_ids: np.ndarray  # [tokens] int32
    logprobs: np.ndarray  # [tokens] float32
    truncated: bool
    place: tuple[int, int] | None  # its round and its row there; None: of a failed episode
    routes: np.ndarray | None = None  # never: each rank has those of its own layers
    versions: np.ndarray | None = None  # never: they are those of the step


@dataclass(frozen=True)
class _Call:
    """An episode, or all single turns of a prompt, that waits for the engine."""

    asked: TurnRequest
    samples: Sequence[int]
    answer: asyncio.Future[list[MegatronTurn]]


class Barrier:
    """Where episodes wait for their next turns; all single turns of a prompt wait together. Each is
    known by the number of its first sample."""

    def __init__(self) -> None:
        self._calls: dict[int, _Call] = {}
        self.news = asyncio.Event()

    async def generate(self, asked: TurnRequest, samples: Sequence[int]) -> list[MegatronTurn]:
        """See `rollout.episodes.Generate`."""
        answer: asyncio.Future[list[MegatronTurn]] = asyncio.get_running_loop().create_future()
        self._calls[samples[0]] = _Call(asked, samples, answer)
        self.news.set()
        return await answer

    @property
    def waiting(self) -> dict[int, _Call]:
        """What the engine is asked for, in the order of the samples. An episode may have given up a
        turn."""
        return {n: call for n, call in sorted(self._calls.items()) if not call.answer.done()}

    def _waits(self, sample: int) -> bool:
        return sample in self._calls and not self._calls[sample].answer.done()

    async def until_all_wait(self, running: Mapping[int, asyncio.Task[Any]]) -> None:
        """Until each of the episodes waits or has ended. Raises what is no fault of theirs."""
        while any(not task.done() and not self._waits(n) for n, task in running.items()):
            self.news.clear()
            await self.news.wait()
            heartbeat()
        for sample, task in running.items():
            if task.done():
                task.result()
                self._calls.pop(sample, None)  # it left a call behind

    def answer(self, turns: Sequence[MegatronTurn]) -> None:
        """Give out the turns of all that wait, in their order."""
        start = 0
        for call in self.waiting.values():
            end = start + len(call.samples)
            call.answer.set_result(list(turns[start:end]))
            start = end
        self._calls = {}


def turns_of(batch: RolloutBatch, number: int) -> list[MegatronTurn]:
    """The turns in the order of the calls. number: of the round."""
    ids = batch.tokens[response_mask(batch)].cpu().numpy().astype(np.int32)
    logprobs = batch.rollout_logprobs.cpu().numpy()
    turns, start = [], 0
    rows = zip(batch.response_lengths.tolist(), batch.truncated.tolist(), strict=True)
    for row, (length, truncated) in enumerate(rows):
        end = start + length
        turns.append(MegatronTurn(ids[start:end], logprobs[start:end], truncated, (number, row)))
        start = end
    return turns


def places_of(played: Sequence[Played]) -> Places:
    """Of each branch of these responses."""
    return [
        len(each.tokens) if branch[0].place is None else [turn.place for turn in branch]
        for each in played
        for branch in each.turns
    ]


def routes_of(places: Places, rounds: Sequence[RolloutBatch]) -> np.ndarray:
    """[tokens, layers of this rank, k]: each token has the experts of the turn in which it was
    first fed. Zeros for episodes without a turn."""
    first = rounds[0].routes
    assert first is not None, "the engine records them"
    if places == [[(0, row)] for row in range(len(rounds[0].response_lengths))]:  # single turns
        return first.cpu().numpy()
    rows: list[Sequence[Tensor]] = []
    for batch in rounds:
        assert batch.routes is not None, "the engine records them in all rounds"
        lengths = (batch.prompt_lengths + batch.response_lengths).tolist()
        rows.append(batch.routes.split(lengths) if lengths else [])
    nothing = first[:0]
    pieces = [nothing]
    for branch in places:
        if isinstance(branch, int):
            pieces.append(nothing.new_zeros((branch, *nothing.shape[1:])))
        else:
            pieces += joined_routes([rows[number][row] for number, row in branch])
    return torch.cat(pieces).cpu().numpy()


def response_mask(batch: RolloutBatch) -> Tensor:
    """[tokens] bool: those of responses."""
    lengths = torch.stack([batch.prompt_lengths, batch.response_lengths], 1).flatten()
    is_response = torch.arange(len(lengths), device=lengths.device) % 2 == 1
    return is_response.repeat_interleave(lengths)
