"""Draws: prompts that are sent to the servers, scored group by group, and put into the bank."""

from __future__ import annotations

import asyncio
import contextlib
import json
import queue
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from gspo_megatron.config import Config
from gspo_megatron.config.schema import suite_key
from gspo_megatron.data.inputs import Inputs
from gspo_megatron.environments.episode import (
    Asked,
    Episode,
    EpisodeRunner,
    Written,
    joined_routes,
)
from gspo_megatron.environments.single_turn import SingleTurn
from gspo_megatron.environments.transcript import records_of
from gspo_megatron.errors import RewardError, RolloutError, UserError
from gspo_megatron.observe.metrics_files import jsonable
from gspo_megatron.rewards.registry import get_reward, suite_rewards
from gspo_megatron.rewards.scoring import (
    FailedCalls,
    PartNames,
    Scorer,
    reward_columns,
)
from gspo_megatron.rewards.shaping import Shaping
from gspo_megatron.rewards.values import Score
from gspo_megatron.rollout.engine import Draw, Sampling
from gspo_megatron.rollout.store import SUFFIX, DrawFile, Group
from gspo_megatron.rollout.vllm.scheduler import Scheduler, all_of
from gspo_megatron.rollout.vllm.worker.gspo_vllm_answers import Response, no_routes
from gspo_megatron.types import Prompt, Sample

REASONS = "reasons"  # the column of rewards' reasons, as JSON
_T = TypeVar("_T")

RECORDS = ("records", "record_lengths")  # columns of a Group


def draw_from_json(given: Mapping[str, Any]) -> Draw:
    """The inverse of `draw_to_json`."""
    sampling: dict[str, Any] = {**given["sampling"], "stop": tuple(given["sampling"]["stop"])}
    draw: dict[str, Any] = {**given, "sampling": Sampling(**sampling)}
    return Draw(**draw)


def draw_to_json(draw: Draw) -> dict[str, Any]:
    return {**vars(draw), "sampling": {**vars(draw.sampling), "stop": list(draw.sampling.stop)}}


class Scorers:
    """Scores groups. Without workers one after the other, in the main thread: reward functions may
    rely on signals, which Python takes there only. With workers many groups at a time."""

    def __init__(self, config: Config, inputs: Inputs) -> None:
        wanted, suites = config.reward, config.evaluation.suites
        reward = get_reward(wanted.name, wanted.import_path, wanted.options, wanted.workers)
        self._scorer = Scorer(reward, wanted)
        self._of_suites = {
            suite_key(name): Scorer(of_suite, suites[name].reward)
            for name, of_suite in suite_rewards(suites).items()
        }
        self._shaping = Shaping(wanted, config.rollout.max_response_tokens)
        self._environment = SingleTurn(inputs.tokenizer)
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

    def work(self) -> None:
        """Score until `stop`. To be called by the main thread."""
        while (job := self._jobs.get()) is not None:
            job()

    def stop(self) -> None:
        """From any thread, or a signal handler."""
        self._jobs.put(None)

    async def score(
        self,
        make: Callable[[], Group],
        prompt: Prompt,
        then: Callable[[Group], None],
        key: str,
        episodes: Sequence[Episode] = (),
    ) -> None:
        """Make a group in the main thread, add the rewards to its columns there, and call `then`
        with it. key: of the prompt's file, which decides the reward; episodes: of the responses,
        where there are several turns."""
        scorer = self._of_suites.get(key, self._scorer)
        given = scorer.given(episodes)

        def begin() -> tuple[Group, list[Sample]]:
            group = make()
            return group, self._samples(group, prompt)

        def finish(group: Group, samples: Sequence[Sample], found: Any) -> None:
            self._add(group, samples, scorer.part_names or (), *found, scorer.take_seconds())
            group.columns.update(record_columns(records_of(episodes, found[0])))
            then(group)

        def whole() -> None:
            group, samples = begin()
            finish(group, samples, scorer.score(samples, given))

        if scorer.workers is None:
            await self._in_main(whole)
            return
        group, samples = await self._in_main(begin)
        found = await scorer.score_async(samples, given)
        await self._in_main(lambda: finish(group, samples, found))

    async def close(self) -> None:
        """End the workers."""
        for scorer in (self._scorer, *self._of_suites.values()):
            if scorer.workers is not None:
                await scorer.workers.close()

    async def _in_main(self, call: Callable[[], _T]) -> _T:
        """The call's result, from the main thread."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[_T] = loop.create_future()

        def job() -> None:
            try:
                told = partial(_settle, future, call())
            except Exception as error:  # noqa: BLE001 (raised where it is awaited)
                told = partial(_settle, future, None, error)
            except BaseException as error:  # noqa: BLE001 (a reward may call sys.exit)
                ended = RewardError(f"the reward function ended with {error!r}")
                ended.__cause__ = error
                told = partial(_settle, future, None, ended)
            with contextlib.suppress(RuntimeError):  # the service has ended
                loop.call_soon_threadsafe(told)

        self._jobs.put(job)
        return await future

    def _samples(self, group: Group, prompt: Prompt) -> list[Sample]:
        columns = group.columns
        return self._environment.samples(
            columns["tokens"],
            columns["prompt_lengths"],
            columns["response_lengths"],
            columns["truncated"],
            columns["group_index"],
            [prompt],
            group.number,
            sampled=columns.get("sampled"),
            in_response=columns.get("in_response"),
        )

    def _add(
        self,
        group: Group,
        samples: Sequence[Sample],
        part_names: PartNames,
        found: Sequence[Score | None],
        failed: FailedCalls,
        seconds: float,
    ) -> None:
        columns = group.columns
        numbers = [group.number] * len(samples)
        scores, turns = reward_columns(found, samples, numbers, len(part_names), self._shaping)
        columns |= {
            "rewards": scores[0],
            "shaped": scores[1],
            "turns": scores[2].astype(np.int64),
            "parts": np.ascontiguousarray(scores[3:]),
            "turn_rewards": np.ascontiguousarray(turns[0]),
            "turn_tokens": turns[1].astype(np.int64),
            "part_names": np.frombuffer(json.dumps(part_names).encode(), np.uint8),
            # a line for each response, so that those of several groups can stand end to end
            REASONS: np.frombuffer(
                "".join(f"{json.dumps(each.reason if each else '')}\n" for each in found).encode(),
                np.uint8,
            ),
            "failed_calls": np.array(failed),
            "reward_seconds": np.array([seconds]),
        }


def _settle(future: asyncio.Future[Any], result: Any, error: Exception | None = None) -> None:
    if future.done():  # nobody waits any more
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)


_END_SECONDS = 5.0  # for draws under way, where the service ends


class RunningDraw:
    """A draw under way, or done."""

    def __init__(self, draw: Draw) -> None:
        self.draw = draw
        self.file: DrawFile | None = None  # until it is read
        self.error: UserError | None = None
        self.tokens = 0  # of finished responses
        self.scoring = 0  # groups whose responses are there, and their rewards not
        self.task: asyncio.Task[None] | None = None

    def status(self) -> dict[str, Any]:
        """For rank 0."""
        error = self.error
        return {
            "finished": 0 if self.file is None else len(self.file.finished),
            "tokens": self.tokens,
            "scoring": self.scoring,
            "done": self.task is not None and self.task.done(),
            "error": None if error is None else {"kind": type(error).__name__, "text": str(error)},
        }


class Draws:
    """All draws of a service."""

    def __init__(
        self,
        pool: Scheduler,
        scorers: Scorers,
        prompts: Mapping[str, Sequence[Prompt]],
        stops: Mapping[str, Any],
        folder: Path,
        origin: str,
        episodes: EpisodeRunner | None = None,
    ) -> None:
        """prompts: by the key of their files; stops: what ends a response, as vLLM's
        SamplingParams; folder: of the bank; origin: of responses and rewards: finished groups of
        another one are not used; episodes: None for single turns."""
        self.pool, self.scorers, self.prompts = pool, scorers, prompts
        self.stops, self.folder, self.origin = stops, folder, origin
        self.episodes = episodes
        self.running: dict[str, RunningDraw] = {}
        self._are_over = False

    def begin(self, draw: Draw) -> RunningDraw:
        """Start a draw, or return the one that was started already. Its error is a DataError where
        the bank cannot be written."""
        running = self.running.get(draw.name)
        if running is None or running.draw != draw or running.error is not None:
            running = RunningDraw(draw)
            self.running[draw.name] = running
            running.task = asyncio.create_task(self._run(running))
        return running

    async def close(self) -> None:
        """End those under way: nobody waits for them any more."""
        self._are_over = True
        tasks = [each.task for each in self.running.values() if each.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:  # code of the user's environment may take its time
            await asyncio.wait(tasks, timeout=_END_SECONDS)

    def path(self, name: str) -> Path:
        return self.folder / f"{name}{SUFFIX}"

    async def _run(self, running: RunningDraw) -> None:
        """Whatever ends it early is the draw's error: somebody waits for its end."""
        try:
            await self._draw(running)
        except UserError as error:
            running.error = error
        except (Exception, asyncio.CancelledError) as error:  # also of the user's code
            if self._are_over and isinstance(error, asyncio.CancelledError):
                raise  # by `close`
            traceback.print_exception(error)
            told = f"draw {running.draw.name} was ended by {type(error).__name__}: {error}"
            running.error = RolloutError(told)

    async def _draw(self, running: RunningDraw) -> None:
        draw = running.draw
        request = {**draw_to_json(draw), "origin": self.origin}
        # it may be large, and is read as a whole
        running.file = await asyncio.to_thread(DrawFile, self.path(draw.name), request)
        numbers = [draw.first + n for n in range(len(draw.rows))]
        missing = [number for number in numbers if number not in running.file.finished]
        groups = [asyncio.create_task(self._group(running, number)) for number in missing]
        try:
            await asyncio.gather(*groups)
        finally:
            for group in groups:
                group.cancel()
            await asyncio.gather(*groups, return_exceptions=True)
            running.file.close()

    async def _group(self, running: RunningDraw, number: int) -> None:
        """Draw, score and keep the responses to one prompt."""
        draw, file = running.draw, running.file
        assert file is not None, "it is closed when all groups have ended"
        prompt = self.prompts[draw.key][draw.rows[number - draw.first]]
        samples = range(number * draw.per_prompt, (number + 1) * draw.per_prompt)
        episodes: list[Episode] = []
        if self.episodes is None:
            limit = draw.sampling.max_tokens
            responses = await self._turns(running, samples, Asked(prompt.token_ids, 0, limit))
        else:
            episodes = await all_of([self._episode(running, prompt, n) for n in samples])
            responses = [self._response_of(draw, episode) for episode in episodes]

        def make() -> Group:
            columns = group_columns(prompt.token_ids, responses, number, samples)
            responses.clear()  # all of it is in the columns
            return Group(number, columns | (episode_columns(episodes) if episodes else {}))

        running.scoring += 1
        try:
            await self.scorers.score(make, prompt, file.append, draw.key, episodes)
        finally:
            running.scoring -= 1

    async def _episode(self, running: RunningDraw, prompt: Prompt, sample: int) -> Episode:
        async def write(asked: Asked) -> Written:
            [response] = await self._turns(running, [sample], asked)
            return Written(response.token_ids.tolist(), response.truncated, source=response)

        assert self.episodes is not None
        return await self.episodes.run(prompt, write)

    def _response_of(self, draw: Draw, episode: Episode) -> Response:
        """An episode as one response."""
        client, settings = episode.client, self.pool.settings
        if client.turns[0].source is not None:
            return joined_turns(episode)
        routes = None  # it failed before its first turn
        if settings.needs.with_routes and draw.sampling.temperature > 0:
            routes = no_routes(len(client.prompt_ids) + 1, settings.facts)
        return Response(
            episode.tokens,
            np.zeros(1, np.float32),
            truncated=True,
            routes=routes,
            versions=np.full(1, draw.version, np.int32),
        )

    async def _turns(
        self, running: RunningDraw, samples: Sequence[int], asked: Asked
    ) -> list[Response]:
        """A turn of each of the samples. Its seed is that of the draw and its numbers."""
        draw, turn = running.draw, (asked.turn,) if asked.turn else ()
        seeds = [(draw.seed, sample, *turn) for sample in samples]
        sampling = self._sampling(draw, asked)
        responses = await self.pool.generate_all(
            asked.token_ids, sampling, seeds, draw.version, draw.name
        )
        running.tokens += sum(len(each.token_ids) for each in responses)
        return responses

    def _sampling(self, draw: Draw, asked: Asked) -> dict[str, Any]:
        """vLLM's SamplingParams of a turn, without the seed."""
        room = self.pool.settings.needs.max_model_len - len(asked.token_ids)
        return {
            "temperature": draw.sampling.temperature,
            "max_tokens": min(asked.max_tokens, room),
            # of a suite: a step's are off, see config/rules.py
            "top_p": draw.sampling.top_p,
            "top_k": draw.sampling.top_k,
            **self.stops,
        }


def joined_turns(episode: Episode) -> Response:
    """The response that an episode's turns, and what stands between them, make."""
    routes = [
        piece
        for branch in episode.client.branches()
        for piece in _routes_of([episode.client.turns[number].source for number in branch.turns])
    ]
    return Response(
        episode.tokens,
        episode.column(lambda turn: turn.source.logprobs, filler=0.0),
        episode.client.is_cut,
        routes=np.concatenate(routes) if routes else None,
        versions=episode.column(lambda turn: turn.source.versions),
    )


def _routes_of(turns: Sequence[Response]) -> list[np.ndarray]:
    """The experts of a branch's tokens, in pieces; none where the servers do not report them."""
    routes = [turn.routes for turn in turns if turn.routes is not None]
    assert len(routes) in (0, len(turns)), "routes of some turns only"
    return joined_routes(routes) if routes else []


def episode_columns(episodes: Sequence[Episode]) -> dict[str, np.ndarray]:
    """The columns of a `Group` that episodes have of their own, or in another form."""
    ids, kinds = zip(*(episode.sequence for episode in episodes))
    return {
        "tokens": np.concatenate(ids),
        "prompt_lengths": np.array([int((~kind).sum()) for kind in kinds]),
        "in_response": np.concatenate(kinds),
        "sampled": np.concatenate([episode.mask for episode in episodes]),
    }


def record_columns(records: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
    """The records of episodes as columns of a `Group`; none of single turns."""
    if not records:
        return {}
    texts = [json.dumps(jsonable(record)).encode() for record in records]
    lengths = np.array([len(text) for text in texts])
    return dict(zip(RECORDS, (np.frombuffer(b"".join(texts), np.uint8), lengths)))


def read_records(texts: np.ndarray, lengths: np.ndarray) -> list[dict[str, Any]]:
    """The inverse of `record_columns`."""
    ends = np.cumsum(lengths)[:-1] if len(lengths) else []
    return [json.loads(part.tobytes()) for part in np.split(texts, ends) if len(part)]


def group_columns(
    prompt: Sequence[int],
    responses: Sequence[Response],
    number: int,
    samples: Sequence[int],
) -> dict[str, np.ndarray]:
    """The columns of a `Group` without its rewards. prompt: token ids."""
    before = np.array(prompt, dtype=np.int32)
    tokens = [part for each in responses for part in (before, each.token_ids)]
    columns = {
        "tokens": np.concatenate(tokens),
        "prompt_lengths": np.full(len(responses), len(before)),
        "response_lengths": np.array([len(each.token_ids) for each in responses]),
        "rollout_logprobs": np.concatenate([each.logprobs for each in responses]),
        "versions": np.concatenate([each.versions for each in responses]),
        "truncated": np.array([each.truncated for each in responses]),
        "sample_index": np.array(samples),
        "group_index": np.full(len(responses), number),
    }
    routes = [each.routes for each in responses if each.routes is not None]
    if routes:
        columns["routes"] = np.concatenate(routes)
    return columns
