"""Episodes of several turns with the model that is trained: all of a rank wait for each other, so
that the engine draws a turn of every episode at a time.

One rank of each model replica runs the environment; the others draw with it, and are told what
stands between the turns.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from gspo_megatron.environments.episode import (
    Asked,
    Branch,
    Episode,
    EpisodeRunner,
    Written,
    joined_routes,
)
from gspo_megatron.errors import UnplayableError
from gspo_megatron.platform.collectives import all_gather_objects
from gspo_megatron.platform.groups import model_replica
from gspo_megatron.process.heartbeat import heartbeat
from gspo_megatron.rollout.engine import Requests, RolloutEngine, Sampling
from gspo_megatron.types import Prompt, RolloutBatch

T = TypeVar("T")

_SEED_OF_TURN = 1 << 56  # turns of a sample have random numbers of their own


@dataclass
class Episodes:
    """The episodes of this rank."""

    batch: RolloutBatch  # with `mask`: what the policy wrote
    # In the order of the batch, on the rank that runs the environment; none of single turns.
    ended: list[Episode] = field(default_factory=list)


@dataclass(frozen=True)
class _Structure:
    """What all ranks must know of an episode; the turns they have drawn themselves."""

    branches: list[Branch]
    between: list[tuple[int, ...]]  # before each turn
    # Round and row of each turn; None: the only token of a failed episode
    drawn: list[tuple[int, int] | None]
    counts: bool  # its turns are learnt from
    is_cut: bool

    @classmethod
    def of(cls, episode: Episode) -> _Structure:
        client = episode.client
        drawn = [turn.source for turn in client.turns]
        counts = episode.error is None
        return cls(client.branches(), client.inserted, drawn, counts, client.is_cut)


class _Room:
    """Where episodes wait for their next turn."""

    def __init__(self) -> None:
        self._asked: dict[int, tuple[Asked, asyncio.Future[Written]]] = {}
        self.news = asyncio.Event()

    async def ask(self, episode: int, asked: Asked) -> Written:
        answer: asyncio.Future[Written] = asyncio.get_running_loop().create_future()
        self._asked[episode] = asked, answer
        self.news.set()
        return await answer

    @property
    def waiting(self) -> dict[int, tuple[Asked, asyncio.Future[Written]]]:
        """By the numbers of the episodes, in their order. An episode may have given up a turn."""
        asked = sorted(self._asked.items())
        return {number: (turn, answer) for number, (turn, answer) in asked if not answer.done()}

    def _waits(self, episode: int) -> bool:
        return episode in self._asked and not self._asked[episode][1].done()

    async def until_all_wait(self, running: Sequence[asyncio.Task[Episode]]) -> None:
        """Until each of the episodes waits or has ended. Raises what is no fault of theirs."""
        while any(not task.done() and not self._waits(n) for n, task in enumerate(running)):
            self.news.clear()
            await self.news.wait()
            heartbeat()
        for number, task in enumerate(running):
            if task.done():
                task.result()
                self._asked.pop(number, None)  # it left a call behind

    def answer(self, batch: RolloutBatch, number: int) -> None:
        """Their turns, in the order of the episodes. number: of the round."""
        lengths = batch.response_lengths.tolist()
        turns = batch.tokens[response_mask(batch)].cpu().split(lengths)
        cut = batch.truncated.tolist()
        for row, (_, answer) in enumerate(self.waiting.values()):
            answer.set_result(Written(turns[row].tolist(), cut[row], source=(number, row)))
        self._asked = {}


def _end(loop: asyncio.AbstractEventLoop) -> None:
    """Also what an environment left running in it, which asyncio would complain about."""
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    if left:  # gather() of nothing belongs to another loop
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
    loop.close()


class Lockstep:
    """Every rank makes one, and calls `run` at the same time."""

    def __init__(
        self, engine: RolloutEngine, episodes: EpisodeRunner, device: torch.device
    ) -> None:
        self.engine, self.episodes, self.device = engine, episodes, device
        self.replica, _ = model_replica()
        self.leader = dist.get_process_group_ranks(self.replica)[0]
        # One for the whole run: a client that the environment keeps belongs to it.
        self.loop = asyncio.new_event_loop()
        weakref.finalize(self, _end, self.loop)

    def run(
        self,
        prompts: Sequence[Prompt],
        groups: Sequence[int],
        per_prompt: int,
        sampling: Sampling,
        seed: int,
    ) -> Episodes:
        """`per_prompt` episodes of each prompt; groups: the prompts' numbers in the step. Raises
        UnplayableError, on all ranks, where the environment of any does."""
        tasks = [prompt for prompt in prompts for _ in range(per_prompt)]
        samples = [group * per_prompt + n for group in groups for n in range(per_prompt)]
        room, running = _Room(), []
        if dist.get_rank() == self.leader:
            running = [self._start(task, n, room) for n, task in enumerate(tasks)]
        rounds: list[RolloutBatch] = []
        while True:
            asked, problem = self._asked(room, running)
            known = torch.tensor([len(asked), problem is not None], device=self.device)
            dist.all_reduce(known)
            anyone, has_failed = known.tolist()
            if has_failed:
                self._raise(problem)
            if not anyone:
                break
            requests = Requests(
                [each.token_ids for each in asked.values()],
                [samples[n] for n in asked],
                max_tokens=[each.max_tokens for each in asked.values()],
            )
            batch = self.engine.generate(requests, sampling, seed + len(rounds) * _SEED_OF_TURN)
            room.answer(batch, len(rounds))
            rounds.append(batch)
        ended = [each.result() for each in running]
        structures = self._told([_Structure.of(each) for each in ended])
        batch = self._assemble(structures, rounds, samples, per_prompt)
        return Episodes(batch, ended)

    def _start(self, task: Prompt, number: int, room: _Room) -> asyncio.Task[Episode]:
        running = self.loop.create_task(self.episodes.run(task, partial(room.ask, number)))
        running.add_done_callback(lambda _: room.news.set())
        return running

    def _asked(
        self, room: _Room, running: Sequence[asyncio.Task[Episode]]
    ) -> tuple[dict[int, Asked], str | None]:
        """What the episodes of this replica wait for, by their numbers; and why none can be
        played, if the environment says so."""
        problem = None
        if running:
            try:
                self.loop.run_until_complete(room.until_all_wait(running))
            except UnplayableError as error:
                problem = str(error)
        return self._told(({n: asked for n, (asked, _) in room.waiting.items()}, problem))

    def _raise(self, problem: str | None) -> NoReturn:
        """On all ranks, with the first of their problems."""
        raise UnplayableError(next(filter(None, all_gather_objects(problem))))

    def _told(self, value: T) -> T:
        """The leader's, on the whole replica."""
        if self.replica.size() == 1:
            return value
        told = [value]
        dist.broadcast_object_list(told, src=self.leader, group=self.replica)
        return told[0]

    def _assemble(
        self,
        structures: Sequence[_Structure],
        rounds: Sequence[RolloutBatch],
        samples: Sequence[int],
        per_prompt: int,
    ) -> RolloutBatch:
        """One sequence for each episode."""
        drawn = [_Rows.of(batch) for batch in rounds]
        nothing = torch.empty(0, dtype=torch.long, device=self.device)
        tokens, logprobs, mask = [nothing], [nothing.float()], [nothing.bool()]
        prompts, lengths, pieces = [], [], []
        routes = [rounds[0].routes[:0]] if rounds and rounds[0].routes is not None else []
        for episode in structures:
            prompts.append(sum(len(branch.prompt) for branch in episode.branches))
            lengths.append(0)
            for branch in episode.branches:
                tokens.append(self._ids(branch.prompt))
                pieces += [len(branch.prompt), 0]
                turns: list[Tensor] = []  # their routes, where recorded
                for number in branch.turns:
                    between, place = episode.between[number], episode.drawn[number]
                    if place is None:
                        eos = self._ids([self.episodes.tokenizer.eos_id])
                        turn = _Turn(eos, nothing.new_zeros(1).float())
                    else:
                        turn = drawn[place[0]].turn(place[1])
                    tokens += [self._ids(between), turn.tokens]
                    logprobs += [turn.logprobs.new_zeros(len(between)), turn.logprobs]
                    counts = torch.full_like(turn.tokens, episode.counts, dtype=torch.bool)
                    mask += [counts.new_zeros(len(between)), counts]
                    pieces[-1] += len(between) + len(turn.tokens)
                    if turn.routes is not None:
                        turns.append(turn.routes)
                lengths[-1] += pieces[-1]
                if routes:
                    missing = routes[0].new_zeros((len(branch.prompt) + 1, *routes[0].shape[1:]))
                    routes.append(torch.cat(joined_routes(turns)) if turns else missing)
        numbers, in_response = self._ids(samples), torch.arange(len(pieces)) % 2 == 1
        return RolloutBatch(
            tokens=torch.cat(tokens),
            prompt_lengths=self._ids(prompts),
            response_lengths=self._ids(lengths),
            rollout_logprobs=torch.cat(logprobs),
            truncated=self._ids([each.is_cut for each in structures]).bool(),
            sample_index=numbers,
            group_index=numbers // per_prompt,
            mask=torch.cat(mask),
            routes=torch.cat(routes) if routes else None,
            in_response=in_response.to(self.device).repeat_interleave(self._ids(pieces)),
        )

    def _ids(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=self.device)


class _Turn(NamedTuple):
    tokens: Tensor  # [tokens]
    logprobs: Tensor  # [tokens]
    routes: Tensor | None = None  # [tokens up to its end, layers, k], where recorded


@dataclass(frozen=True)
class _Rows:
    """What one call of the engine drew, row by row."""

    tokens: tuple[Tensor, ...]
    logprobs: tuple[Tensor, ...]
    routes: tuple[Tensor, ...] | None

    @classmethod
    def of(cls, batch: RolloutBatch) -> _Rows:
        lengths = batch.response_lengths.tolist()
        both = (batch.prompt_lengths + batch.response_lengths).tolist()
        return cls(
            batch.tokens[response_mask(batch)].split(lengths),
            batch.rollout_logprobs.split(lengths),
            None if batch.routes is None else batch.routes.split(both),
        )

    def turn(self, row: int) -> _Turn:
        routes = None if self.routes is None else self.routes[row]
        return _Turn(self.tokens[row], self.logprobs[row], routes)


def response_mask(batch: RolloutBatch) -> Tensor:
    """[tokens] bool: those of responses."""
    lengths = torch.stack([batch.prompt_lengths, batch.response_lengths], 1).flatten()
    is_response = torch.arange(len(lengths), device=lengths.device) % 2 == 1
    return is_response.repeat_interleave(lengths)
