"""Collects the turns that the episodes of a rank wait for, so that the engine generates one turn
of every episode in one batch.

The episodes wait in `Barrier`. The functions below it join the routes that this rank recorded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gspo_megatron.environments.episode import TurnRequest
from gspo_megatron.environments.transcript import joined_routes
from gspo_megatron.process.heartbeat import heartbeat
from gspo_megatron.rollout.engine import Requests
from gspo_megatron.rollout.episodes import Played
from gspo_megatron.types import RolloutBatch

# For each branch, the (round, row) of each of its turns. For an episode without a turn, the number
# of its tokens, which have no routes.
Places = Sequence[list[tuple[int, int]] | int]


@dataclass(eq=False)
class MegatronTurn:
    """A turn that the engine of this rank generated: see `rollout.episodes.GeneratedTurn`."""

    token_ids: np.ndarray  # [tokens] int32
    logprobs: np.ndarray  # [tokens] float32
    truncated: bool
    place: tuple[int, int] | None  # (round, row); None: the placeholder of a failed episode
    routes: np.ndarray | None = None  # always None: each rank has the routes of its own layers
    versions: np.ndarray | None = None  # always None: all tokens have the weights of the step


@dataclass(frozen=True)
class _Call:
    """A call of `Barrier.generate`: for the next turn of an episode, or for all single turns of a
    prompt."""

    asked: TurnRequest
    samples: Sequence[int]
    answer: asyncio.Future[list[MegatronTurn]]


class Barrier:
    """Runs the episodes of a rank, and lets them wait for their next turns. All single turns of a
    prompt wait as one call.

    The key of an episode and of its call is the number of its first sample.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._running: dict[int, asyncio.Task[list[Played]]] = {}
        self._calls: dict[int, _Call] = {}
        self._asked: list[_Call] = []  # the calls of the last `requests`, which wait for `answer`
        self._news = asyncio.Event()
        self._rounds = 0  # number of calls of `answer`

    def start(self, episodes: Mapping[int, Coroutine[Any, Any, list[Played]]]) -> None:
        """Start the episodes that `rollout.episodes.players` has made."""
        for sample, episode in episodes.items():
            self._running[sample] = self._loop.create_task(episode)
            self._running[sample].add_done_callback(lambda _: self._news.set())

    async def generate(self, asked: TurnRequest, samples: Sequence[int]) -> list[MegatronTurn]:
        """Generate one turn for each of `samples`: see `rollout.episodes.Generate`."""
        answer: asyncio.Future[list[MegatronTurn]] = asyncio.get_running_loop().create_future()
        self._calls[samples[0]] = _Call(asked, samples, answer)
        self._news.set()
        return await answer

    async def requests(self, *, router_noise: bool = True) -> Requests:
        """Wait until every episode waits for a turn or has ended. Return the call of the engine
        that generates all these turns. All calls of a round have the same number of samples.

        Raises RolloutError and UnplayableError. Other failures of an episode are part of its
        result.
        """
        while any(not task.done() and not self._waits(n) for n, task in self._running.items()):
            self._news.clear()
            await self._news.wait()
            heartbeat()
        for sample, task in self._running.items():
            if task.done():
                task.result()
                self._calls.pop(sample, None)  # an ended episode may leave a call behind
        # the calls in the order of the samples, without cancelled calls
        calls = [call for _, call in sorted(self._calls.items()) if not call.answer.done()]
        self._asked, self._calls = calls, {}
        count = len(calls[0].samples) if calls else 1
        return Requests(
            [call.asked.token_ids for call in calls],
            [call.samples[0] // count for call in calls],
            count,
            [call.asked.max_tokens for call in calls],
            router_noise=router_noise,
        )

    def _waits(self, sample: int) -> bool:
        return sample in self._calls and not self._calls[sample].answer.done()

    def answer(self, batch: RolloutBatch) -> None:
        """Give each call its turns. batch: the engine's responses to the last `requests`."""
        number, self._rounds = self._rounds, self._rounds + 1
        if not self._asked:
            return
        lengths = torch.stack([batch.prompt_lengths, batch.response_lengths], 1).flatten()
        is_response = torch.arange(len(lengths), device=lengths.device) % 2 == 1
        ids = batch.tokens[is_response.repeat_interleave(lengths)].cpu().numpy().astype(np.int32)
        logprobs = batch.rollout_logprobs.cpu().numpy()
        turns, start = [], 0
        rows = zip(batch.response_lengths.tolist(), batch.truncated.tolist(), strict=True)
        for row, (length, truncated) in enumerate(rows):
            turn, start = slice(start, start + length), start + length
            turns.append(MegatronTurn(ids[turn], logprobs[turn], truncated, (number, row)))
        of_call = iter(turns)
        for call in self._asked:
            own = [next(of_call) for _ in call.samples]
            if not call.answer.done():  # given up just after `requests` has listed it
                call.answer.set_result(own)

    def played(self) -> list[Played]:
        """Return the responses of all episodes, in the order of `start`. All have ended."""
        return [each for task in self._running.values() for each in task.result()]


def places_of(played: Sequence[Played]) -> Places:
    """Return the places of the turns of each branch of these responses."""
    return [
        len(each.tokens) if branch[0].place is None else [turn.place for turn in branch]
        for each in played
        for branch in each.turns
    ]


def routes_of(places: Places, rounds: Sequence[RolloutBatch]) -> np.ndarray:
    """Join the routes of all rounds: [tokens, layers of this rank, k].

    Each token gets the experts of the first turn in which it was fed to the model. Tokens of
    episodes without a turn get zeros.
    """
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
