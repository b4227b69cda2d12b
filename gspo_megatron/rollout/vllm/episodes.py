"""Runs requests in the rollout service: generates on servers, scores each group and stores it."""

from __future__ import annotations

import asyncio
import queue
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from gspo_megatron.config import Config
from gspo_megatron.config.schema import suite_key
from gspo_megatron.data.inputs import Inputs
from gspo_megatron.environments.episode import Episode, EpisodeRunner, TurnRequest
from gspo_megatron.errors import DataError, EpisodeError, RewardError, RolloutError, UserError
from gspo_megatron.process.coroutines import run_together
from gspo_megatron.rewards.registry import reward_of, suite_rewards
from gspo_megatron.rewards.scoring import FailedCalls
from gspo_megatron.rewards.values import Score
from gspo_megatron.rollout.engine import RolloutRequest
from gspo_megatron.rollout.episodes import GroupScorer, Played, assemble, players
from gspo_megatron.rollout.store import SUFFIX, RequestFile
from gspo_megatron.rollout.types import RolloutGroup
from gspo_megatron.rollout.vllm.scheduler import Scheduler
from gspo_megatron.rollout.vllm.worker.gspo_vllm_answers import Response, no_routes
from gspo_megatron.types import Prompt, Sample

_T = TypeVar("_T")


class Scorers:
    """Scores groups. With reward workers, it scores many groups at a time. Without them, it scores
    one group after the other in the main thread.

    Reward functions may use signals, which Python handles only in the main thread.
    """

    def __init__(self, config: Config, inputs: Inputs) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._load_rewards(config, inputs)

    def _load_rewards(self, config: Config, inputs: Inputs) -> None:
        reward, suites = reward_of(config.reward), config.evaluation.suites
        self._scorer = GroupScorer.of(
            config, inputs.tokenizer, reward, config.reward, is_learnt=True
        )
        self._of_suites = {
            suite_key(name): GroupScorer.of(config, inputs.tokenizer, of_suite, suites[name].reward)
            for name, of_suite in suite_rewards(suites).items()
        }

    async def renew(self, config: Config, inputs: Inputs) -> None:
        """Score with the rewards of another phase from now on."""
        await self.close()
        await self.in_main(lambda: self._load_rewards(config, inputs))

    def work(self) -> None:
        """Score until `stop`. The main thread calls this."""
        while (job := self._jobs.get()) is not None:
            job()

    def stop(self) -> None:
        """Make `work` return. Any thread or a signal handler may call this."""
        self._jobs.put(None)

    async def score(
        self,
        make: Callable[[], RolloutGroup],
        prompt: Prompt,
        then: Callable[[RolloutGroup], None],
        request: RolloutRequest,
        episodes: Sequence[Episode] = (),
    ) -> None:
        """Make a group, write the rewards into its columns and call `then` with it.

        All three happen in the main thread. request: the request of the prompt. Its key selects the
        reward, and teachers judge only responses that the policy learns from. episodes: the
        episodes of the responses, if there is an environment.
        """
        scoring = self._of_suites.get(request.key, self._scorer)
        scorer, given = scoring.scorer, scoring.scorer.given(episodes)

        def begin() -> tuple[RolloutGroup, list[Sample]]:
            group = make()
            return group, scoring.samples(group, {group.number: prompt})

        def finish(
            group: RolloutGroup,
            samples: Sequence[Sample],
            result: tuple[list[Score | None], FailedCalls],
            failures: int = 0,
        ) -> None:
            scores, failed = result
            failed = failed._replace(errors=failed.errors + failures)
            scoring.fill_in(group, samples, scores, failed, scorer.take_seconds(), episodes)
            then(group)

        def score_at_once() -> None:
            group, samples = begin()
            finish(group, samples, scorer.score(samples, given))

        if scorer.workers is None and scoring.teachers is None and scoring.model is None:
            await self.in_main(score_at_once)
            return
        group, samples = await self.in_main(begin)
        if scorer.workers is None:
            result = await self.in_main(lambda: scorer.score(samples, given))
        else:
            result = await scorer.score_async(samples, given)
        failures = await scoring.ask_servers(
            group, samples, {group.number: prompt}, is_learnt=request.is_learnt
        )
        await self.in_main(lambda: finish(group, samples, result, failures))

    async def close(self) -> None:
        """End the workers."""
        for scoring in (self._scorer, *self._of_suites.values()):
            if scoring.scorer.workers is not None:
                await scoring.scorer.workers.close()

    async def in_main(self, call: Callable[[], _T]) -> _T:
        """Run a call in the main thread; returns its result. A caller that is cancelled before the
        call begins takes it back."""
        future: Future[_T] = Future()

        def job() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(call())
            except Exception as error:  # noqa: BLE001 (raised where it is awaited)
                future.set_exception(error)
            except BaseException as error:  # noqa: BLE001 (a reward may call sys.exit)
                ended = RewardError(f"the reward function ended with {error!r}")
                ended.__cause__ = error
                future.set_exception(ended)

        self._jobs.put(job)
        return await asyncio.wrap_future(future)


_END_SECONDS = 5.0  # time for requests in progress to end when the service ends


@dataclass(eq=False)
class RunningRequest:
    """A request in progress or done."""

    request: RolloutRequest
    file: RequestFile | None = None  # None until the file has been read
    error: UserError | None = None
    tokens: int = 0  # tokens of finished turns
    scoring: int = 0  # groups that have responses but no rewards yet
    task: asyncio.Task[None] | None = None

    def status(self) -> dict[str, Any]:
        """Return the status for rank 0."""
        error = self.error
        return {
            "finished": 0 if self.file is None else len(self.file.finished),
            "tokens": self.tokens,
            "scoring": self.scoring,
            "done": self.task is not None and self.task.done(),
            "error": None if error is None else {"kind": type(error).__name__, "text": str(error)},
        }


@dataclass(eq=False)
class ServedRequests:
    """All requests of a service."""

    scheduler: Scheduler
    scorers: Scorers
    prompts: Mapping[str, Sequence[Prompt]]  # by the key of their files
    stops: Mapping[str, Any]  # vLLM's SamplingParams that end a response
    folder: Path  # of the store
    # Fingerprint of all that decides responses and rewards. Groups with another one are not used.
    origin: str
    episodes: EpisodeRunner | None = None  # None: single turns
    running: dict[str, RunningRequest] = field(default_factory=dict)
    _are_over: bool = False

    def begin(self, request: RolloutRequest) -> RunningRequest:
        """Start a request, or return it if it has started already.

        Its `error` is a DataError if the store cannot be written.
        """
        running = self.running.get(request.name)
        if running is None or running.request != request or running.error is not None:
            running = RunningRequest(request)
            self.running[request.name] = running
            running.task = asyncio.create_task(self._run(running))
        return running

    async def close(self) -> None:
        """Cancel all requests in progress."""
        self._are_over = True
        tasks = [each.task for each in self.running.values() if each.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:  # code of the user's environment may end late
            await asyncio.wait(tasks, timeout=_END_SECONDS)

    def path(self, name: str) -> Path:
        return self.folder / f"{name}{SUFFIX}"

    async def _run(self, running: RunningRequest) -> None:
        """Run a request. Any exception becomes the request's `error`, which ends rank 0's wait."""
        try:
            await self._request(running)
        except (DataError, EpisodeError, RewardError, RolloutError) as error:
            running.error = error
        except UserError as error:  # the error of a reward may be any UserError
            running.error = RewardError(str(error))
        except (Exception, asyncio.CancelledError) as error:  # the user's code may raise both
            if self._are_over and isinstance(error, asyncio.CancelledError):
                raise  # `close` has cancelled the request
            traceback.print_exception(error)
            message = f"request {running.request.name} was ended by {type(error).__name__}: {error}"
            running.error = RolloutError(message)

    async def _request(self, running: RunningRequest) -> None:
        request = running.request
        content = {**asdict(request), "origin": self.origin}
        # in a thread, because the file may be large and is read completely
        running.file = await asyncio.to_thread(RequestFile, self.path(request.name), content)
        numbers = [request.first + n for n in range(len(request.rows))]
        missing = [number for number in numbers if number not in running.file.finished]
        try:
            await run_together(self._group(running, number) for number in missing)
        finally:
            running.file.close()

    async def _group(self, running: RunningRequest, number: int) -> None:
        """Generate, score and store the responses to one prompt."""
        request, file = running.request, running.file
        assert file is not None, "it is closed when all groups have ended"
        prompt = self.prompts[request.key][request.rows[number - request.first]]
        samples = range(number * request.per_prompt, (number + 1) * request.per_prompt)
        played = await self._play(running, prompt, samples)
        episodes = [each.episode for each in played if each.episode is not None]

        def make() -> RolloutGroup:
            has_episodes = self.episodes is not None
            group = assemble(played, samples, request.per_prompt, has_episodes=has_episodes)
            played.clear()  # frees memory: the group holds the same data
            return group

        running.scoring += 1
        try:
            await self.scorers.score(make, prompt, file.append, request, episodes)
        finally:
            running.scoring -= 1

    async def _play(
        self, running: RunningRequest, prompt: Prompt, samples: Sequence[int]
    ) -> list[Played]:
        """Generate the responses to a prompt."""
        request = running.request
        works = players(
            prompt,
            samples,
            request.sampling.max_tokens,
            self.episodes,
            partial(self._turns, running),
            partial(self._no_turn, request),
        )
        return [each for played in await run_together(works.values()) for each in played]

    def _no_turn(self, request: RolloutRequest, prompt_tokens: int) -> Response:
        """Make the placeholder turn of a failed episode: see `players`."""
        assert self.episodes is not None
        settings, routes = self.scheduler.settings, None
        if settings.needs.with_routes and request.sampling.temperature > 0:
            routes = no_routes(prompt_tokens + 1, settings.facts)
        return Response(
            np.array([self.episodes.tokenizer.eos_id], np.int32),
            np.zeros(1, np.float32),
            truncated=True,
            routes=routes,
            versions=np.full(1, request.version, np.int32),
        )

    async def _turns(
        self, running: RunningRequest, asked: TurnRequest, samples: Sequence[int]
    ) -> list[Response]:
        """Generate a turn of each sample. The seed of a turn depends on the request's seed, the
        sample and the number of the turn."""
        request, turn = running.request, (asked.turn,) if asked.turn else ()
        seeds = [(request.seed, sample, *turn) for sample in samples]
        sampling = self._sampling(request, asked)
        responses = await self.scheduler.generate_all(
            asked.token_ids, sampling, seeds, request.version, request.name
        )
        running.tokens += sum(len(each.token_ids) for each in responses)
        return responses

    def _sampling(self, request: RolloutRequest, asked: TurnRequest) -> dict[str, Any]:
        """Return vLLM's SamplingParams of a turn, without the seed."""
        room = self.scheduler.settings.needs.max_model_len - len(asked.token_ids)
        return {
            "temperature": request.sampling.temperature,
            "max_tokens": min(asked.max_tokens, room),
            # Only suites use top_p and top_k; training steps sample without them (config/rules.py).
            "top_p": request.sampling.top_p,
            "top_k": request.sampling.top_k,
            **self.stops,
        }
