"""The RolloutSource of the in-process engine: runs episodes, generates and scores on the ranks.

One rank of each model replica, the leader, runs the environments and the reward. The other ranks of
the replica take part in the forward passes: before each turn the leader sends them the tokens, and
at the end it sends them the responses. Each rank adds the routes of its own layers.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist

from gspo_megatron.environments.episode import Episode, EpisodeRunner
from gspo_megatron.errors import EpisodeError, RewardError, UnplayableError, UserError, error_of
from gspo_megatron.platform.collectives import all_gather_numbers, all_gather_objects, from_rank
from gspo_megatron.platform.groups import model_replica
from gspo_megatron.process.cores import raise_open_files
from gspo_megatron.process.coroutines import allow_many_threads
from gspo_megatron.process.heartbeat import heard_by
from gspo_megatron.rewards.scoring import FailedCalls, describe
from gspo_megatron.rollout.engine import (
    Requests,
    RolloutEngine,
    RolloutRequest,
    RolloutShare,
    Sampling,
)
from gspo_megatron.rollout.episodes import GroupScorer, assemble, players
from gspo_megatron.rollout.megatron.barrier import (
    Barrier,
    MegatronTurn,
    Places,
    places_of,
    routes_of,
)
from gspo_megatron.rollout.types import RolloutGroup
from gspo_megatron.types import Prompt, RolloutBatch


def _seed_of_turn(seed: int, turn: int) -> int:
    """Return a seed of its own for each turn, so that each turn of a sample has its own random
    numbers. The generators use the lowest 64 bits."""
    return seed + (turn % 256 << 56) + (turn // 256 << 48)


@dataclass
class Generated:
    """The responses of a rank before scoring."""

    # only on the leader of the replica:
    group: RolloutGroup | None
    episodes: list[Episode]  # in the order of `group`; empty for single turns
    places: Places
    # on all ranks:
    rounds: list[RolloutBatch]  # the engine's output in each round


class MegatronRollouts:
    """Implements RolloutSource. Every rank makes one and calls its methods at the same time."""

    def __init__(
        self,
        engine: RolloutEngine,
        episodes: EpisodeRunner | None,
        device: torch.device,
        layers: Sequence[int] = (),
    ) -> None:
        """episodes: None for single turns; layers: the numbers (counted from 1) of this rank's
        layers whose routes the engine returns; empty if the engine returns no routes."""
        self.engine, self.episodes = engine, episodes
        self.device, self.layers = device, layers
        self.replica, _ = model_replica()
        self.leader = dist.get_process_group_ranks(self.replica)[0]
        self.is_leader = dist.get_rank() == self.leader
        # The whole run uses one loop, because a client that the environment keeps is bound to its
        # loop.
        self.loop = asyncio.new_event_loop()
        weakref.finalize(self, _end, self.loop)
        if episodes is not None:  # all episodes of a step run at the same time
            raise_open_files()
            allow_many_threads(self.loop)
        self.report: Callable[[str], None] = lambda text: None

    def begin(self, request: RolloutRequest) -> None:
        """Do nothing: the ranks start a request in `take`."""

    def take(
        self,
        request: RolloutRequest,
        prompts: Mapping[int, Prompt],
        scorer: GroupScorer,
        *,
        router_noise: bool,
    ) -> RolloutShare:
        """Generate and score responses. See RolloutSource.

        The reward may be slow or nondeterministic, so one rank of each model replica calls it and
        sends the scores to the other ranks.

        Raises, on all ranks, RewardError if the reward failed or returned no reward on any rank,
        and EpisodeError if an episode failed, unless `reward.on_failure` says otherwise.
        """
        generated = self.generate(
            prompts,
            request.per_prompt,
            request.sampling,
            request.seed,
            router_noise=router_noise,
        )
        failed, seconds = self.score(generated, prompts, scorer, learns=request.is_learnt)
        return RolloutShare(self.share(generated), failed, seconds)

    def take_weights(self, version: int) -> dict[str, float]:
        """See RolloutSource."""
        self.engine.update_weights()
        return {}

    def after_checkpoint(self, step: int) -> None:
        """Do nothing: this source keeps nothing between steps."""

    def hand_over(self) -> None:
        """Return nothing: the next phase builds the policy again."""

    def close(self) -> None:
        """Do nothing."""

    # The parts of `take`, in order

    def generate(
        self,
        prompts: Mapping[int, Prompt],
        per_prompt: int,
        sampling: Sampling,
        seed: int,
        *,
        router_noise: bool = True,
    ) -> Generated:
        """Generate `per_prompt` responses to each prompt.

        prompts: the prompts by their numbers in the step; router_noise: see RolloutSource.take.
        Raises UnplayableError on all ranks if the environment of any rank raises it.
        """
        samples = [range(number * per_prompt, (number + 1) * per_prompt) for number in prompts]
        barrier = Barrier(self.loop)
        # Without an environment, every rank of a replica works out the calls by itself, so the
        # leader sends none.
        if self.is_leader or self.episodes is None:
            limit, no_turn = sampling.max_tokens, self._no_turn
            for prompt, numbers in zip(prompts.values(), samples, strict=True):
                barrier.start(
                    players(prompt, numbers, limit, self.episodes, barrier.generate, no_turn)
                )
        rounds: list[RolloutBatch] = []
        while (requests := self._next_requests(barrier, router_noise=router_noise)) is not None:
            batch = self.engine.generate(requests, sampling, _seed_of_turn(seed, len(rounds)))
            barrier.answer(batch)
            rounds.append(batch)
        if not self.is_leader:
            return Generated(None, [], [], rounds)
        played = barrier.played()
        numbers = [number for each in samples for number in each]
        has_episodes = self.episodes is not None
        group = assemble(played, numbers, per_prompt, has_episodes=has_episodes)
        episodes = [each.episode for each in played if each.episode is not None]
        has_routes = bool(rounds) and rounds[0].routes is not None
        return Generated(group, episodes, places_of(played) if has_routes else [], rounds)

    def score(
        self,
        generated: Generated,
        prompts: Mapping[int, Prompt],
        scorer: GroupScorer,
        *,
        learns: bool,
    ) -> tuple[FailedCalls, float]:
        """Write the scores into the leader's group.

        learns: whether the policy learns from the responses; teachers judge no others. Returns the
        failures on all ranks, and the seconds of the slowest rank.
        """
        group, scores, failed = generated.group, [], FailedCalls()
        samples, problem = [], None
        if group is not None:
            try:
                samples = scorer.samples(group, prompts)
                given = scorer.scorer.given(generated.episodes)
                with heard_by(lambda: self.report(scorer.scorer.progress())):
                    scores, failed = scorer.scorer.score(samples, given)
                asking = scorer.ask_servers(group, samples, prompts, is_learnt=learns)
                failures = self.loop.run_until_complete(asking)
                failed = failed._replace(errors=failed.errors + failures)
                self.report("")
            except UserError as error:
                problem = error
        counts, seconds = self._agree(scorer, problem, failed)
        if group is not None:
            scorer.fill_in(group, samples, scores, failed, seconds, generated.episodes)
        return counts, seconds

    def _agree(
        self, scorer: GroupScorer, problem: UserError | None, failed: FailedCalls
    ) -> tuple[FailedCalls, float]:
        """Return, on all ranks, the failures of all ranks and the seconds of the slowest rank.

        Also gives all ranks the names of the reward's parts. Raises EpisodeError or RewardError on
        all ranks if any rank has a problem, or if the names differ.
        """
        names = scorer.scorer.part_names
        has_news = problem is not None or names != scorer.part_names
        of_ranks = all_gather_numbers([has_news, *failed, scorer.scorer.take_seconds()])
        has_any, *counts = of_ranks[:, :-1].sum(0).long().tolist()
        slowest = float(of_ranks[:, -1].max())  # each rank waits for the slowest
        agreed = FailedCalls(*counts), slowest
        if not has_any:
            return agreed
        own_error = None if problem is None else (type(problem).__name__, str(problem))
        gathered = all_gather_objects((own_error, names))
        problems = [each for each, _ in gathered if each is not None]
        if problems:
            others = f" (and on {len(problems) - 1} more ranks)" if len(problems) > 1 else ""
            error = error_of(problems[0][0], problems[0][1] + others)
            if not isinstance(error, EpisodeError):  # the error of a reward may be any UserError
                error = RewardError(str(error))
            raise error from problem
        parts = list(dict.fromkeys(names for _, names in gathered if names is not None))
        if len(parts) > 1:
            raise RewardError(
                f"reward {scorer.reward.name!r} returned "
                f"{' and '.join(map(describe, parts))} on different ranks; the same names are "
                "wanted in every call"
            )
        if parts:  # no names are of_ranks if all calls failed
            scorer.part_names = scorer.scorer.part_names = parts[0]
        return agreed

    def share(self, generated: Generated) -> RolloutGroup:
        """Return the leader's group on all ranks of the replica, with this rank's routes."""
        group, places, rounds = generated.group, generated.places, generated.rounds
        has_routes = bool(rounds) and rounds[0].routes is not None
        if self.replica.size() > 1:
            content = b"" if group is None else group.without_texts().save()
            content, places = from_rank((content, places), self.leader, self.replica)
            group = RolloutGroup.load(content) if group is None else group
        assert group is not None, "the leader has one"
        if not has_routes:
            return group
        layers = np.array(self.layers, np.int64)
        return replace(group, routes=routes_of(places, rounds), layers=layers)

    def _no_turn(self, prompt_tokens: int) -> MegatronTurn:
        assert self.episodes is not None
        ids = np.array([self.episodes.tokenizer.eos_id], np.int32)
        return MegatronTurn(ids, np.zeros(1, np.float32), truncated=True, place=None)

    def _next_requests(self, barrier: Barrier, *, router_noise: bool) -> Requests | None:
        """Return this replica's next call of the engine. Returns None if no rank has calls any
        more.

        Raises UnplayableError on all ranks, with the problem of the first rank that has one.
        """
        requests, problem = Requests([], []), None
        try:
            requests = self.loop.run_until_complete(barrier.requests(router_noise=router_noise))
        except UnplayableError as error:
            problem = str(error)
        if self.episodes is not None:
            requests, problem = from_rank((requests, problem), self.leader, self.replica)
        counts = torch.tensor([len(requests.prompts), problem is not None], device=self.device)
        dist.all_reduce(counts)
        count, problems = counts.tolist()
        if problems:
            raise UnplayableError(next(filter(None, all_gather_objects(problem))))
        return requests if count else None


def _end(loop: asyncio.AbstractEventLoop) -> None:
    """Close the loop. First cancel tasks that an environment left running, to avoid warnings."""
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:  # without tasks, gather() would use another loop
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
    loop.close()
