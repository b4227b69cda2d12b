"""Evaluates suites on an OpenAI-compatible server, which has its own model and tokenizer."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp

from gspo_megatron.addresses import keyed_session, read_answer, wait_as_told
from gspo_megatron.config.load import dump_yaml, parse_suites
from gspo_megatron.config.schema import SuiteSection, suite_key
from gspo_megatron.data.chat import tools_in
from gspo_megatron.data.formats import field_map
from gspo_megatron.data.prompts import load_prompts
from gspo_megatron.errors import ConfigError, DataError, RolloutError, gathered_in
from gspo_megatron.evaluation.scores import figures_of_records, response_record
from gspo_megatron.files import WRONG_VALUES, make_folder, os_errors, parse_json, write_atomically
from gspo_megatron.observe.metrics_files import (
    EVALUATION_FILE,
    METRICS_FILE,
    RL,
    JsonLinesWriter,
    MetricsWriter,
)
from gspo_megatron.observe.progress import Progress
from gspo_megatron.observe.suite_table import print_suites
from gspo_megatron.process.coroutines import run_together
from gspo_megatron.rewards.registry import Reward, check_answers, check_section, suite_rewards
from gspo_megatron.rewards.scoring import Scorer
from gspo_megatron.rewards.values import Score
from gspo_megatron.rollout.reward_model import with_model
from gspo_megatron.types import Prompt, Sample

KEY_VARIABLE = "OPENAI_API_KEY"
_TRIES = 5
_FIRST_WAIT_SECONDS = 0.5  # the wait before a request is repeated; it doubles with each repetition
_RESPONSE_SECONDS = 3600
_BUSY = 429  # HTTP status: too many requests


class ServerEvaluation:
    """Checked suites with their problems and rewards, and the server to evaluate."""

    def __init__(
        self, url: str, suites: Mapping[str, Any], overrides: Sequence[str], out: Path
    ) -> None:
        """Load and check the suites.

        url: the server's URL without /v1. suites: the suites by name, as in evaluation.suites. out:
        the folder for the results; it must not hold an evaluation.

        Raises ConfigError with all problems of the suites and their files."""
        if not suites:
            raise ConfigError([f"{url}: names nothing to evaluate; allowed: --suite FILE.yaml"])
        self.url, self.out = url, out
        self.section = parse_suites(suites, overrides)
        self.prompts: dict[str, list[Prompt]] = {}
        self.rewards: dict[str, Reward] = {}
        problems: list[str] = []
        with gathered_in(problems):
            self.rewards = suite_rewards(self.section.suites)
        for name, suite in self.section.suites.items():
            with gathered_in(problems):
                if name in self.rewards:
                    place = f"{suite_key(name)}: "
                    check_section(self.rewards[name], suite.reward, suite.samples, place)
            with gathered_in(problems):
                self.prompts[name] = _load(name, suite)
                if name in self.rewards:
                    check_answers(self.rewards[name], self.prompts[name])
        if _holds_records(out):
            problems.append(
                f"--output {out}: holds the responses of an evaluation; allowed: another folder"
            )
        if problems:
            raise ConfigError(problems)

    def run(self, model: str | None, requests: int) -> None:
        """Evaluate all suites, write the results into the folder `out` and print a table.

        Sends up to `requests` requests at a time. Without `model`, takes the server's first model.
        Raises RolloutError if the server fails, RewardError if a reward fails."""
        metrics: dict[str, Any] = {"phase": RL, "step": 0}
        model = model or asyncio.run(self._first_model())
        with self._files() as (responses, figures):
            for name, suite in self.section.suites.items():
                samples: list[Sample | None] = [None] * (len(self.prompts[name]) * suite.samples)
                records: list[dict[str, Any]] | None = None
                try:
                    asyncio.run(self._request_samples(name, suite, model, requests, samples))
                    complete = [each for each in samples if each is not None]
                    records = self._judge(name, suite, complete)
                finally:
                    # If the server or the reward fails, the responses so far are written without
                    # rewards, because the server may have needed hours for them.
                    if records is None:
                        records = self._records(name, suite, samples, [None] * len(samples), [])
                    for record in records:
                        responses.append({"phase": RL, "step": 0, **record})
                try:
                    suite_metrics = figures_of_records(records, suite)
                except ValueError as error:
                    raise RolloutError(f"{suite_key(name)}: {error}") from error
                for key, value in suite_metrics.items():
                    metrics[f"evaluation/{name}/{key}"] = value
            figures.write(metrics)
        print_suites(self.out)

    @contextlib.contextmanager
    def _files(self) -> Any:
        with os_errors(f"--output {self.out}", "cannot be made"):
            make_folder(self.out)
        text = dump_yaml({"evaluation": self.section.model_dump()})
        write_atomically(self.out / "suites.yaml", text.encode())
        with (
            JsonLinesWriter(self.out / EVALUATION_FILE) as responses,
            MetricsWriter(self.out) as figures,
        ):
            yield responses, figures

    async def _first_model(self) -> str:
        async with _session(self.url) as session:
            models = await _call(session, f"{self.url}/v1/models", None)
        try:
            return str(models["data"][0]["id"])
        except WRONG_VALUES as error:
            raise RolloutError(f"{self.url}: names no model; allowed: --model NAME") from error

    async def _request_samples(
        self,
        name: str,
        suite: SuiteSection,
        model: str,
        requests: int,
        samples: list[Sample | None],
    ) -> None:
        """Write the responses to each problem into `samples`, in the order of the problems."""
        prompts, slots = self.prompts[name], asyncio.Semaphore(requests)
        with Progress(len(samples), name, unit="response") as progress:
            async with _session(self.url) as session:
                count = 0  # of complete responses

                async def request(place: int) -> None:
                    nonlocal count
                    problem, number = divmod(place, suite.samples)
                    async with slots:
                        samples[place] = await self._response(
                            session, suite, model, prompts[problem], number
                        )
                    count += 1
                    progress.update(count, {})

                await run_together(request(place) for place in range(len(samples)))

    async def _response(
        self,
        session: aiohttp.ClientSession,
        suite: SuiteSection,
        model: str,
        prompt: Prompt,
        seed: int,
    ) -> Sample:
        request = {
            "model": model,
            "messages": list(prompt.messages),
            "temperature": suite.temperature,
            "top_p": suite.top_p,
            "seed": seed,
        }
        if suite.max_response_tokens is not None:
            request["max_tokens"] = suite.max_response_tokens
        if suite.top_k:  # OpenAI's own API does not have this parameter
            request["top_k"] = suite.top_k
        if prompt.tools:
            # "none": the server describes the tools, and does not take calls out of the text.
            request |= {"tools": list(prompt.tools), "tool_choice": "none"}
        answer = await _call(session, f"{self.url}/v1/chat/completions", request)
        try:
            choice = answer["choices"][0]
            return Sample(
                prompt=prompt.text,
                answer=prompt.answer,
                response=_text(choice["message"].get("content")),
                truncated=choice["finish_reason"] == "length",
                fields=prompt.fields,
                num_tokens=int((answer.get("usage") or {}).get("completion_tokens") or 0),
                messages=prompt.messages,
                row_id=prompt.row_id,
            )
        except WRONG_VALUES as error:
            raise RolloutError(f"{self.url}: not an answer in OpenAI's form: {error!r}") from error

    def _judge(
        self, name: str, suite: SuiteSection, samples: Sequence[Sample]
    ) -> list[dict[str, Any]]:
        reward = self.rewards[name]
        with contextlib.closing(Scorer(reward, suite.reward)) as scorer:
            scores, _ = scorer.score(
                [replace(each, group=n // suite.samples) for n, each in enumerate(samples)]
            )
        scores = with_model(suite.reward, samples, scores)
        answers = [reward.answer_in(sample) for sample in samples]
        return self._records(name, suite, samples, scores, answers)

    def _records(
        self,
        name: str,
        suite: SuiteSection,
        samples: Sequence[Sample | None],
        scores: Sequence[Score | None],
        answers: Sequence[Any],
    ) -> list[dict[str, Any]]:
        """Return the records of a suite's responses. samples: a response, or None if it is missing;
        a missing response has no record. scores: one for each response, or None. answers: one for
        each response, as the reward read it; empty if no reward was called."""
        least = self.section.correct_at if suite.correct_at is None else suite.correct_at
        return [
            {
                "suite": name,
                "problem": place // suite.samples,
                "sample": place % suite.samples,
                **_record(sample, score, least),
                "read_answer": answers[place] if answers else None,
            }
            for place, (score, sample) in enumerate(zip(scores, samples, strict=True))
            if sample is not None
        ]


def _holds_records(out: Path) -> bool:
    """Whether a folder has responses or figures of an evaluation, complete or not. The files are
    empty if the evaluation failed before its first response."""
    for name in (EVALUATION_FILE, METRICS_FILE):
        with contextlib.suppress(OSError):
            if (out / name).stat().st_size:
                return True
    return False


def _record(sample: Sample, score: Score | None, least: float) -> dict[str, Any]:
    if score is None:
        return response_record(sample, math.nan, {}, "", least)
    return response_record(sample, float(score.rewards.sum()), score.parts, score.reason, least)


def _load(name: str, suite: SuiteSection) -> list[Prompt]:
    """Load a suite's problems as messages, with the tools of their rows. The server applies its
    chat template, if it has one.

    Raises DataError with the faults of all files."""
    prompts: list[Prompt] = []
    problems: list[str] = []
    for path in suite.prompts:
        with gathered_in(problems):
            prompts += load_prompts(path, field_map(suite, suite_key(name)), chat_template=True)
    if problems:
        raise DataError("\n".join(problems))
    return [replace(each, tools=_tools(each)) for each in prompts[: suite.limit]]


def _tools(prompt: Prompt) -> tuple[dict[str, Any], ...]:
    try:
        return tuple(tools_in(prompt.fields))
    except DataError as error:
        raise DataError(f"{prompt.source}: {error}") from error


def _text(content: Any) -> str:
    """Return the content of a message; "" for null (the model wrote only thoughts). Raises
    TypeError."""
    if not isinstance(content, str | None):
        raise TypeError(f"content = {content!r:.60}: a text is wanted")
    return content or ""


def _session(url: str) -> aiohttp.ClientSession:
    return keyed_session(url, KEY_VARIABLE, _RESPONSE_SECONDS, force_close=True)


async def _call(session: aiohttp.ClientSession, url: str, body: Any) -> Any:
    """Send a request (GET if `body` is None, else POST) and return the answer.

    Repeats the request if the server is busy, fails or cannot be reached. Raises RolloutError."""
    method, wait = "GET" if body is None else "POST", _FIRST_WAIT_SECONDS
    for remaining in reversed(range(_TRIES)):
        try:
            async with session.request(method, url, json=body) as response:
                content = await read_answer(response)
                if response.status < 400:
                    return parse_json(content)
                text = " ".join(content.decode(errors="replace").split())[:300]
                wrong = f"{url}: HTTP {response.status}: {text}"
                if response.status < 500 and response.status != _BUSY:
                    break
                if remaining:
                    await wait_as_told(response)
        except asyncio.TimeoutError:
            wrong = f"{url}: no answer within {_RESPONSE_SECONDS} s"
        except ValueError as error:
            wrong = f"{url}: the answer is not JSON: {error}"
            break
        except (aiohttp.ClientError, OSError) as error:
            wrong = f"{url}: {error or type(error).__name__}"
        if remaining:
            await asyncio.sleep(wait)
            wait *= 2
    raise RolloutError(wrong)
