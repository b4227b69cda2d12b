"""Episodes with the model that is trained: all of a rank wait for each other, so that the engine
generates a turn of every episode at a time.

One rank of each model replica, its leader, runs the environments. The others generate with it: they
are told what stands before the turns, and at the end what the responses are. Each rank adds the
routes of its own layers.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from gspo_megatron.environments.episode import Asked, Episode, EpisodeRunner, joined_routes
from gspo_megatron.errors import UnplayableError
from gspo_megatron.platform.collectives import all_gather_objects
from gspo_megatron.platform.groups import model_replica
from gspo_megatron.process.heartbeat import heartbeat
from gspo_megatron.rollout.engine import Requests, RolloutEngine, Sampling
from gspo_megatron.rollout.episodes import Played, assemble, players
from gspo_megatron.rollout.types import RolloutGroup
from gspo_megatron.types import Prompt, RolloutBatch

T = TypeVar("T")

_SEED_OF_TURN = 1 << 56  # turns of a sample have random numbers of their own


@dataclass(eq=False)
class Turn:
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

    asked: Asked
    samples: Sequence[int]
    answer: asyncio.Future[list[Turn]]


class Barrier:
    """Where episodes wait for their next turns; all single turns of a prompt wait together. Each is
    known by the number of its first sample."""

    def __init__(self) -> None:
        self._calls: dict[int, _Call] = {}
        self.news = asyncio.Event()

    async def generate(self, asked: Asked, samples: Sequence[int]) -> list[Turn]:
        """See `rollout.episodes.Generate`."""
        answer: asyncio.Future[list[Turn]] = asyncio.get_running_loop().create_future()
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

    def answer(self, turns: Sequence[Turn]) -> None:
        """Give out the turns of all that wait, in their order."""
        start = 0
        for call in self.waiting.values():
            end = start + len(call.samples)
            call.answer.set_result(list(turns[start:end]))
            start = end
        self._calls = {}


@dataclass
class Generated:
    """The responses of a rank before they are scored."""

    # on the leader of the replica:
    group: RolloutGroup | None
    episodes: list[Episode]  # in the order of the group; none of single turns
    # Of each branch where its turns are, or tokens without routes of an episode that had none.
    places: list[list[tuple[int, int]] | int]
    # on all ranks:
    rounds: list[RolloutBatch]  # what the engine generated


class BatchedEpisodes:
    """Every rank makes one, and calls its methods at the same time."""

    def __init__(
        self,
        engine: RolloutEngine,
        episodes: EpisodeRunner | None,
        device: torch.device,
        layers: Sequence[int] = (),
    ) -> None:
        """episodes: None for single turns; layers: numbers of this rank's layers, from 1, whose
        routes the engine returns, if it does."""
        self.engine, self.episodes = engine, episodes
        self.device, self.layers = device, layers
        self.replica, _ = model_replica()
        self.leader = dist.get_process_group_ranks(self.replica)[0]
        self.is_leader = dist.get_rank() == self.leader
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
        *,
        router_noise: bool = True,
    ) -> Generated:
        """`per_prompt` responses to each prompt; groups: the prompts' numbers in the step;
        router_noise: that of the engine, if it has any. Raises UnplayableError, on all ranks, where
        the environment of any does."""
        samples = [range(group * per_prompt, (group + 1) * per_prompt) for group in groups]
        barrier, running = Barrier(), {}
        # Without an environment all ranks of a replica do the same, and need not be told.
        if self.is_leader or self.episodes is None:
            running = self._start(barrier, prompts, samples, sampling.max_tokens)
        rounds: list[RolloutBatch] = []
        while (calls := self._calls(barrier, running)) is not None:
            requests = _requests(calls, router_noise=router_noise)
            batch = self.engine.generate(requests, sampling, seed + len(rounds) * _SEED_OF_TURN)
            if running:
                barrier.answer(_turns_of(batch, len(rounds)))
            rounds.append(batch)
        if not self.is_leader:
            return Generated(None, [], [], rounds)
        played = [each for task in running.values() for each in task.result()]
        numbers = [number for each in samples for number in each]
        has_episodes = self.episodes is not None
        group = assemble(played, numbers, per_prompt, has_episodes=has_episodes)
        episodes = [each.episode for each in played if each.episode is not None]
        return Generated(group, episodes, _places(played), rounds)

    def share(self, generated: Generated) -> RolloutGroup:
        """The leader's group, on the whole replica, with the routes of this rank's layers."""
        group, places, rounds = generated.group, generated.places, generated.rounds
        has_routes = bool(rounds) and rounds[0].routes is not None
        if self.replica.size() > 1:
            content = b"" if group is None else group.without_texts().save()
            content, places = self._told((content, places if has_routes else []))
            group = RolloutGroup.load(content) if group is None else group
        assert group is not None, "the leader has one"
        if not has_routes:
            return group
        layers = np.array(self.layers, np.int64)
        return replace(group, routes=_routes(places, rounds), layers=layers)

    def _start(
        self,
        barrier: Barrier,
        prompts: Sequence[Prompt],
        samples: Sequence[Sequence[int]],
        max_tokens: int,
    ) -> dict[int, asyncio.Task[list[Played]]]:
        """The players of this rank, by the number of their first sample."""
        running = {}
        for prompt, numbers in zip(prompts, samples, strict=True):
            works = players(
                prompt, numbers, max_tokens, self.episodes, barrier.generate, self._no_turn
            )
            for sample, work in works.items():
                running[sample] = self.loop.create_task(work)
                running[sample].add_done_callback(lambda _: barrier.news.set())
        return running

    def _no_turn(self, prompt_tokens: int) -> Turn:
        assert self.episodes is not None
        ids = np.array([self.episodes.tokenizer.eos_id], np.int32)
        return Turn(ids, np.zeros(1, np.float32), truncated=True, place=None)

    def _calls(
        self, barrier: Barrier, running: Mapping[int, asyncio.Task[Any]]
    ) -> list[_Asked] | None:
        """What this replica wants from the engine; None: no rank wants anything more. Raises
        UnplayableError, on all ranks, with the first of their problems."""
        problem = None
        if running:
            try:
                self.loop.run_until_complete(barrier.until_all_wait(running))
            except UnplayableError as error:
                problem = str(error)
        calls = [
            _Asked(call.asked.token_ids, call.asked.max_tokens, call.samples)
            for call in barrier.waiting.values()
        ]
        if self.episodes is not None:
            calls, problem = self._told((calls, problem))
        known = torch.tensor([len(calls), problem is not None], device=self.device)
        dist.all_reduce(known)
        count, problems = known.tolist()
        if problems:
            raise UnplayableError(next(filter(None, all_gather_objects(problem))))
        return calls if count else None

    def _told(self, value: T) -> T:
        """The leader's, on the whole replica."""
        if self.replica.size() == 1:
            return value
        told = [value]
        dist.broadcast_object_list(told, src=self.leader, group=self.replica)
        return told[0]


class _Asked(NamedTuple):
    """What the ranks of a replica know of a call."""

    token_ids: Sequence[int]
    max_tokens: int
    samples: Sequence[int]  # as many in all calls


def _requests(calls: Sequence[_Asked], *, router_noise: bool) -> Requests:
    count = len(calls[0].samples) if calls else 1
    return Requests(
        [call.token_ids for call in calls],
        [call.samples[0] // count for call in calls],
        count,
        [call.max_tokens for call in calls],
        router_noise=router_noise,
    )


def _turns_of(batch: RolloutBatch, number: int) -> list[Turn]:
    """The turns in the order of the calls. number: of the round."""
    ends = batch.response_lengths.cumsum(0)[:-1].tolist()
    ids = batch.tokens[response_mask(batch)].cpu().numpy().astype(np.int32)
    columns = (
        np.split(ids, ends) if len(batch.response_lengths) else [],
        np.split(batch.rollout_logprobs.cpu().numpy(), ends),
        batch.truncated.tolist(),
    )
    return [Turn(*values, place=(number, row)) for row, values in enumerate(zip(*columns))]


def _places(played: Sequence[Played]) -> list[list[tuple[int, int]] | int]:
    """See Generated."""
    return [
        len(each.tokens) if branch[0].place is None else [turn.place for turn in branch]
        for each in played
        for branch in each.turns
    ]


def _routes(
    places: Sequence[list[tuple[int, int]] | int], rounds: Sequence[RolloutBatch]
) -> np.ndarray:
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


def _end(loop: asyncio.AbstractEventLoop) -> None:
    """Also what an environment left running in it, which asyncio would complain about."""
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    if left:  # gather() of nothing belongs to another loop
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
    loop.close()
