"""Draws: prompts that are sent to the servers, scored group by group, and put into the bank."""

from __future__ import annotations

import asyncio
import json
import queue
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from gspo_megatron.config import Config
from gspo_megatron.data.inputs import Inputs
from gspo_megatron.environments.single_turn import SingleTurn
from gspo_megatron.errors import UserError
from gspo_megatron.rewards.registry import get_reward
from gspo_megatron.rewards.scoring import Scorer, reward_columns
from gspo_megatron.rewards.shaping import Shaping
from gspo_megatron.rollout.engine import Draw, Sampling
from gspo_megatron.rollout.service.bank import SUFFIX, DrawFile, Group
from gspo_megatron.rollout.service.client import Response
from gspo_megatron.rollout.service.pool import Pool
from gspo_megatron.types import Prompt


def draw_from_json(given: Mapping[str, Any]) -> Draw:
    """The inverse of `draw_to_json`."""
    sampling = {**given["sampling"], "stop": tuple(given["sampling"]["stop"])}
    return Draw(**{**given, "sampling": Sampling(**sampling)})


def draw_to_json(draw: Draw) -> dict[str, Any]:
    return {**vars(draw), "sampling": {**vars(draw.sampling), "stop": list(draw.sampling.stop)}}


class Scorers:
    """Scores groups, one after the other, in the main thread: reward functions may rely on signals,
    which Python takes there only."""

    def __init__(self, config: Config, inputs: Inputs) -> None:
        wanted = config.reward
        reward = get_reward(wanted.name, wanted.import_path, wanted.options, wanted.workers)
        self._scorer = Scorer(reward, wanted)
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

    def submit(self, group: Group, prompt: Prompt, then: Callable[[Group], None]) -> Future[None]:
        """Add the group's rewards to its columns, and call `then` with it in the main thread."""
        future: Future[None] = Future()

        def job() -> None:
            try:
                self._score(group, prompt)
                then(group)
            except Exception as error:  # noqa: BLE001 (raised where the future is awaited)
                future.set_exception(error)
            else:
                future.set_result(None)

        self._jobs.put(job)
        return future

    def _score(self, group: Group, prompt: Prompt) -> None:
        columns = group.columns
        names = ("tokens", "prompt_lengths", "response_lengths", "truncated", "group_index")
        samples = self._environment.samples(
            *(columns[name] for name in names), [prompt], group.number
        )
        found, errors = self._scorer.score(samples)
        part_names = self._scorer.part_names or ()
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
            "reward_errors": np.array([errors]),
        }


class RunningDraw:
    """A draw under way, or done."""

    def __init__(self, draw: Draw, file: DrawFile) -> None:
        self.draw, self.file = draw, file
        self.error: UserError | None = None
        self.tokens = 0  # of finished responses
        self.task: asyncio.Task[None] | None = None

    def status(self) -> dict[str, Any]:
        """For rank 0."""
        error = self.error
        return {
            "finished": len(self.file.finished),
            "tokens": self.tokens,
            "done": self.task is not None and self.task.done(),
            "error": None if error is None else {"kind": type(error).__name__, "text": str(error)},
        }


class Draws:
    """All draws of a service."""

    def __init__(
        self,
        pool: Pool,
        scorers: Scorers,
        prompts: Mapping[str, Sequence[Prompt]],
        stops: Mapping[str, Any],
        folder: Path,
        origin: str,
    ) -> None:
        """prompts: by the key of their files; stops: what ends a response, as vLLM's
        SamplingParams; folder: of the bank; origin: of responses and rewards: finished groups of
        another one are not used."""
        self.pool, self.scorers, self.prompts = pool, scorers, prompts
        self.stops, self.folder, self.origin = stops, folder, origin
        self.running: dict[str, RunningDraw] = {}

    def begin(self, draw: Draw) -> RunningDraw:
        """Start a draw, or return the one that was started already. Raises DataError where the
        bank cannot be written."""
        running = self.running.get(draw.name)
        if running is None or running.draw != draw or running.error is not None:
            if running is not None:
                running.file.close()
            request = {**draw_to_json(draw), "origin": self.origin}
            running = RunningDraw(draw, DrawFile(self.path(draw.name), request))
            self.running[draw.name] = running
            running.task = asyncio.create_task(self._run(running))
        return running

    def path(self, name: str) -> Path:
        return self.folder / f"{name}{SUFFIX}"

    async def _run(self, running: RunningDraw) -> None:
        draw = running.draw
        numbers = [draw.first + n for n in range(len(draw.rows))]
        missing = [number for number in numbers if number not in running.file.finished]
        groups = [asyncio.create_task(self._group(running, number)) for number in missing]
        try:
            await asyncio.gather(*groups)
        except UserError as error:
            running.error = error
        finally:
            for group in groups:
                group.cancel()
            await asyncio.gather(*groups, return_exceptions=True)
            running.file.close()

    async def _group(self, running: RunningDraw, number: int) -> None:
        """Draw, score and keep the responses to one prompt."""
        draw = running.draw
        prompt = self.prompts[draw.key][draw.rows[number - draw.first]]
        samples = range(number * draw.per_prompt, (number + 1) * draw.per_prompt)
        calls = [asyncio.create_task(self._response(running, prompt, n)) for n in samples]
        try:
            responses = await asyncio.gather(*calls)
        finally:
            for call in calls:
                call.cancel()
        group = Group(number, group_columns(prompt.token_ids, responses, number, samples))
        await asyncio.wrap_future(self.scorers.submit(group, prompt, running.file.append))

    async def _response(self, running: RunningDraw, prompt: Prompt, sample: int) -> Response:
        draw = running.draw
        sampling = self._sampling(draw, prompt, sample)
        response = await self.pool.generate(prompt.token_ids, sampling, draw.version, draw.name)
        running.tokens += len(response.token_ids)
        return response

    def _sampling(self, draw: Draw, prompt: Prompt, sample: int) -> dict[str, Any]:
        """vLLM's SamplingParams of a response, whose seed is that of the draw and its number."""
        room = self.pool.settings.needs.max_model_len - len(prompt.token_ids)
        seed = np.random.SeedSequence((draw.seed, sample)).generate_state(1, np.uint64)[0]
        return {
            "temperature": draw.sampling.temperature,
            "max_tokens": min(draw.sampling.max_tokens, room),
            "seed": int(seed >> np.uint64(1)),
            **self.stops,
        }


def group_columns(
    prompt: Sequence[int], responses: Sequence[Response], number: int, samples: Sequence[int]
) -> dict[str, np.ndarray]:
    """The columns of a `Group` without its rewards."""
    prompt_ids = np.array(prompt, dtype=np.int32)
    tokens = [part for each in responses for part in (prompt_ids, each.token_ids)]
    columns = {
        "tokens": np.concatenate(tokens),
        "prompt_lengths": np.full(len(responses), len(prompt)),
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
