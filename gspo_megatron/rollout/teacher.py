"""Teachers behind a URL: their log-probs of the tokens that the policy has written, and their most
probable tokens in these places.

A server is vLLM, or another one with its `prompt_logprobs` and `/tokenize`. It may hold a model of
any shape, with the policy's tokenizer. Each branch of a response goes there whole, as token ids.
The teacher's temperature is 1: prompt_logprobs know no other.
"""

from __future__ import annotations

import asyncio
import math
import os
import sys
import time
import weakref
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from gspo_megatron.config.distillation import DistillationSection
from gspo_megatron.config.schema import RewardSection
from gspo_megatron.errors import DataError, RewardError, some_of
from gspo_megatron.process.heartbeat import heartbeat
from gspo_megatron.rewards.scoring import CONCURRENT_CALLS, FIRST_WAIT_SECONDS
from gspo_megatron.rewards.values import shorten
from gspo_megatron.rollout.types import RolloutGroup
from gspo_megatron.types import Prompt

if TYPE_CHECKING:
    from aiohttp import ClientSession

    from gspo_megatron.data.tokenizers import Tokenizer

_T = TypeVar("_T")
PROBE = "Ünïcode, 12 + 34 = 46;\n\tthe end, 終わり. {}[]"
KEY_VARIABLE = "OPENAI_API_KEY"  # of the server, as for the reward llm_judge
_USERS_MISTAKES = (401, 403, 404, 405)
_LENGTH_OF_LIST = "--max-logprobs"  # vLLM's option


# Whose prompts


def teacher_number(section: DistillationSection, prompt: Prompt) -> int:
    """The number in `section.named` of a prompt's teacher; -1 where it has none. Raises DataError
    where the prompt's row names no teacher."""
    if section.field is None:
        return 0 if section.is_on else -1
    if section.field not in prompt.fields:
        raise DataError(f"{prompt.source}: the row has no {section.field!r}, {_which(section)}")
    name, names = prompt.fields[section.field], [*section.teachers]
    if name not in names:
        known = ", ".join(names)
        raise DataError(
            f"{prompt.source}: {section.field} = {shorten(name)} names no teacher, "
            f"{_which(section)}; known: {known}; a name with {{}} is for prompts without a teacher"
        )
    each = section.teachers[name]
    return -1 if each.teacher is None and each.url is None else names.index(name)


def _which(section: DistillationSection) -> str:
    return f"as objective.distillation.field = {section.field} wants"


def check_teachers(section: DistillationSection, prompts: Iterable[Prompt]) -> None:
    """Raise DataError with the prompts whose row names no teacher, one line each."""
    problems = []
    for prompt in prompts if section.field is not None else ():
        try:
            teacher_number(section, prompt)
        except DataError as error:
            problems.append(str(error))
    if problems:
        raise DataError("\n".join(some_of(problems)))


# What they say


class Judged(NamedTuple):
    """What teachers say of the responses of a group: columns of RolloutGroup."""

    failures: int = 0  # calls, repeated ones too
    # [response tokens] float32; NaN in responses whose call failed for good; 0 where there is no
    # teacher, or one that the training ranks compute; None: there are no servers
    logprobs: np.ndarray | None = None
    tokens: np.ndarray | None = None  # [response tokens, k] int32, filled up with -1
    top_logprobs: np.ndarray | None = None  # [response tokens, k] float32
    seconds: np.ndarray | None = None  # [1] float64, wall seconds
    teachers: np.ndarray | None = None  # [num_sequences] int32, -1: none; None: one for all


@dataclass
class _Said:
    """What a server says of the response tokens of a branch."""

    logprobs: np.ndarray  # [tokens] float32
    tokens: np.ndarray  # [tokens, k] int32
    top_logprobs: np.ndarray  # [tokens, k] float32

    @classmethod
    def all(cls, count: int, k: int, logprob: float) -> _Said:
        nothing = np.full((count, k), -1, np.int32), np.full((count, k), -np.inf, np.float32)
        return cls(np.full(count, logprob, np.float32), *nothing)


class Teachers:
    """All teachers of a run, those of servers asked. Deadline, repetition and what follows a
    failure are those of `reward`."""

    def __init__(
        self, section: DistillationSection, reward: RewardSection, tokenizer: Tokenizer
    ) -> None:
        self.section, self.k = section, section.candidates
        self.servers = {
            number: _Server(
                f"{section.key_of(number, 'url')} = {url}", url, self.k, reward, tokenizer
            )
            for number, url in section.urls.items()
        }
        self._timeout_seconds = reward.timeout_seconds
        self._loop: asyncio.AbstractEventLoop | None = None

    def judge(self, group: RolloutGroup, prompts: Mapping[int, Prompt]) -> Judged:
        """`judge_async`, in an event loop of its own."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            weakref.finalize(self, self._loop.close)
        return self._loop.run_until_complete(self.judge_async(group, prompts))

    async def judge_async(self, group: RolloutGroup, prompts: Mapping[int, Prompt]) -> Judged:
        """prompts: by their numbers in the step. Raises RewardError for what the user can mend,
        and, with `reward.on_failure` stop, for a call that failed for good."""
        numbers = None
        if self.section.field is not None:
            of_prompt = {
                n: teacher_number(self.section, prompts[n]) for n in {*group.group_index.tolist()}
            }
            numbers = np.array([of_prompt[n] for n in group.group_index.tolist()], np.int32)
        if not self.servers:
            return Judged(teachers=numbers)
        began = time.perf_counter()
        said, failures = await self._ask(group, numbers)
        seconds = np.array([time.perf_counter() - began])
        said = [_Said.all(0, self.k, 0.0), *said]
        columns = [np.concatenate([each.logprobs for each in said]), None, None]
        if self.k:
            columns[1] = np.concatenate([each.tokens for each in said])
            columns[2] = np.concatenate([each.top_logprobs for each in said])
        return Judged(failures, *columns, seconds, numbers)

    async def _ask(
        self, group: RolloutGroup, numbers: np.ndarray | None
    ) -> tuple[list[_Said], int]:
        """Of each branch what its teacher says, and how many calls failed."""
        import aiohttp  # not at the top: most runs have no teacher

        key = os.environ.get(KEY_VARIABLE)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        timeout = aiohttp.ClientTimeout(total=self._timeout_seconds)
        branches = _branches(group)
        servers = [
            self.servers.get(0 if numbers is None else int(numbers[row])) for row, *_ in branches
        ]
        async with aiohttp.ClientSession(
            timeout=timeout, headers=headers, trust_env=True
        ) as session:
            asked = [server for server in self.servers.values() if server in servers]
            failures = sum([await server.introduce(session) for server in asked])
            slots = asyncio.Semaphore(CONCURRENT_CALLS)
            tasks = [
                asyncio.ensure_future(server.of_branch(session, ids, is_response, slots))
                for server, (_, ids, is_response) in zip(servers, branches, strict=True)
                if server is not None
            ]
            try:
                answers = iter(await asyncio.gather(*tasks))
            finally:
                for task in tasks:  # the others, where one has failed for good
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        said = []
        for server, (_, _, is_response) in zip(servers, branches, strict=True):
            if server is None:
                said.append(_Said.all(int(is_response.sum()), self.k, 0.0))
                continue
            found, failed = next(answers)
            said.append(found)
            failures += failed
        return said, failures


class _Server:
    """One teacher's server."""

    def __init__(
        self, name: str, url: str, k: int, reward: RewardSection, tokenizer: Tokenizer
    ) -> None:
        """name: of its key, for messages; k: most probable tokens to ask for."""
        self.name, self.url, self.k = name, url.rstrip("/"), k
        self.reward, self.tokenizer = reward, tokenizer
        self._model = ""  # the model's name there; empty: not asked yet
        self._told = False  # that calls fail

    async def introduce(self, session: ClientSession) -> int:
        """Ask for the model's name where it is not known; returns how many calls failed."""
        if self._model:
            return 0
        found, failures = await self._repeated(lambda: self._agreed_model(session))
        self._model = found or ""
        return failures

    async def _agreed_model(self, session: ClientSession) -> str:
        """The model's name, after its tokenizer was compared."""
        model = (await self._asked(session, "GET", f"{self.url}/models"))["data"][0]["id"]
        given = {"model": model, "prompt": PROBE, "add_special_tokens": False}
        tokenize = f"{self.url.removesuffix('/v1')}/tokenize"
        theirs = (await self._asked(session, "POST", tokenize, given))["tokens"]
        if theirs != self.tokenizer.encode(PROBE):
            raise RewardError(
                f"{self.name}: its tokenizer makes other tokens of a text than data.tokenizer; "
                "give a teacher with the same one"
            )
        return model

    async def of_branch(
        self,
        session: ClientSession,
        ids: np.ndarray,
        is_response: np.ndarray,
        slots: asyncio.Semaphore,
    ) -> tuple[_Said, int]:
        """What the server says of its response tokens, and how many calls failed."""
        found, failures = None, 0
        if self._model:  # nobody knows its name where that call failed for good
            async with slots:
                call = partial(self._logprobs, session, ids, is_response)
                found, failures = await self._repeated(call)
        if found is None:
            found = _Said.all(int(is_response.sum()), self.k, math.nan)
        return found, failures

    async def _repeated(self, call: Callable[[], Awaitable[_T]]) -> tuple[_T | None, int]:
        """What a call returns, None where it failed for good and responses may be lost; and how
        many calls failed."""
        tries = 0
        while True:
            try:
                return await call(), tries
            except RewardError:
                raise
            except Exception as error:  # noqa: BLE001 (whatever a server may answer)
                tries += 1
                problem = error
            finally:
                heartbeat()
            text = " ".join(str(problem).split())
            what = f"{self.name}: {type(problem).__name__}: {text}"
            if tries > self.reward.retries:
                if self.reward.on_failure == "stop":
                    raise RewardError(f"{what}, in the last of {tries} calls") from problem
                return None, tries
            if not self._told:
                self._told = True
                more = "further failures are only counted"
                print(f"{what}; it is asked again; {more}", file=sys.stderr, flush=True)
            await asyncio.sleep(FIRST_WAIT_SECONDS * 2 ** (tries - 1))

    async def _logprobs(
        self, session: ClientSession, ids: np.ndarray, is_response: np.ndarray
    ) -> _Said:
        tokens = ids.tolist()
        given = {"model": self._model, "prompt": tokens, "max_tokens": 1, "prompt_logprobs": self.k}
        answer = await self._asked(session, "POST", f"{self.url}/completions", given)
        entries = answer["choices"][0]["prompt_logprobs"]
        if len(entries) != len(tokens):
            raise ValueError(f"log-probs of {len(entries)} tokens for {len(tokens)}")
        places = is_response.nonzero()[0].tolist()
        said = _Said.all(len(places), self.k, math.nan)
        for row, number in enumerate(places):
            entry = {int(token): float(each["logprob"]) for token, each in entries[number].items()}
            for value in entry.values() if self.k else (entry[tokens[number]],):
                if not math.isfinite(value):
                    raise ValueError(f"a log-prob of {value}")
            said.logprobs[row] = entry[tokens[number]]
            # the token written is beyond the k where it is not one of the most probable
            best = sorted(entry.items(), key=lambda each: -each[1])[: self.k]
            if len(best) < self.k:
                raise ValueError(f"{len(best)} most probable tokens for top_k = {self.k}")
            if best:
                said.tokens[row], said.top_logprobs[row] = zip(*best)
        return said

    async def _asked(self, session: ClientSession, method: str, url: str, given: Any = None) -> Any:
        async with session.request(method, url, json=given) as response:
            text = await response.text()
            if response.status in _USERS_MISTAKES:
                raise RewardError(f"{self.name}: {url} says {response.status}: {text[:500]}")
            if response.status == 400 and self.k and "logprobs" in text:
                advice = f"start it with {_LENGTH_OF_LIST} {self.k}, or lower top_k"
                raise RewardError(f"{self.name}: {url} says 400: {text[:500]}; {advice}")
            if response.status != 200:
                raise ConnectionError(f"{url} says {response.status}: {text[:500]}")
            return await response.json()


def _branches(group: RolloutGroup) -> list[tuple[int, np.ndarray, np.ndarray]]:
    """Of each branch, in order: the row of its response, its tokens, and which of them are of the
    response."""
    found, end = [], 0
    rows = zip(group.prompt_lengths.tolist(), group.response_lengths.tolist(), strict=True)
    for row, (prompt, response) in enumerate(rows):
        start, end = end, end + prompt + response
        ids = group.tokens[start:end]
        if group.in_response is None:
            kinds = np.arange(prompt + response) >= prompt
        else:
            kinds = group.in_response[start:end]
        # a branch begins where a prompt follows a response
        cuts = np.flatnonzero(~kinds[1:] & kinds[:-1]) + 1
        found += (
            (row, *each) for each in zip(np.split(ids, cuts), np.split(kinds, cuts), strict=True)
        )
    return found
