"""A teacher behind a URL: its log-probs of the tokens that the policy has written.

The server is vLLM, or another one with its `prompt_logprobs` and `/tokenize`. It may hold a model
of any shape, with the policy's tokenizer. Each branch of a response goes there whole, as token ids.
The teacher's temperature is 1: prompt_logprobs know no other.
"""

from __future__ import annotations

import asyncio
import math
import os
import sys
import time
import weakref
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from gspo_megatron.config.objectives import DistillationSection
from gspo_megatron.config.schema import RewardSection
from gspo_megatron.errors import RewardError
from gspo_megatron.process.heartbeat import heartbeat
from gspo_megatron.rewards.scoring import CONCURRENT_CALLS, FIRST_WAIT_SECONDS
from gspo_megatron.rollout.types import RolloutGroup

if TYPE_CHECKING:
    from aiohttp import ClientSession

    from gspo_megatron.data.tokenizers import Tokenizer

_T = TypeVar("_T")
PROBE = "Ünïcode, 12 + 34 = 46;\n\tthe end, 終わり. {}[]"
KEY_VARIABLE = "OPENAI_API_KEY"  # of the server, as for the reward llm_judge
_USERS_MISTAKES = (401, 403, 404, 405)


class Judged(NamedTuple):
    """What a teacher says of the responses of a group."""

    logprobs: np.ndarray  # [response tokens] float32; NaN in responses whose call failed for good
    failures: int  # calls, repeated ones too
    seconds: np.ndarray  # [1] float64, wall seconds


class Teacher:
    """Asks the server. Deadline, repetition and what follows a failure are those of `reward`."""

    def __init__(
        self, section: DistillationSection, reward: RewardSection, tokenizer: Tokenizer
    ) -> None:
        assert section.url is not None
        self.url, self.reward, self.tokenizer = section.url.rstrip("/"), reward, tokenizer
        self.name = f"objective.distillation.url = {section.url}"
        self._model = ""  # the model's name there; empty: not asked yet
        self._told = False  # that calls fail
        self._loop: asyncio.AbstractEventLoop | None = None

    def judge(self, group: RolloutGroup) -> Judged:
        """`judge_async`, in an event loop of its own."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            weakref.finalize(self, self._loop.close)
        return self._loop.run_until_complete(self.judge_async(group))

    async def judge_async(self, group: RolloutGroup) -> Judged:
        """Raises RewardError for what the user can mend, and, with `reward.on_failure` stop, for a
        call that failed for good."""
        import aiohttp  # not at the top: most runs have no teacher

        began = time.perf_counter()
        key = os.environ.get(KEY_VARIABLE)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        timeout = aiohttp.ClientTimeout(total=self.reward.timeout_seconds)
        async with aiohttp.ClientSession(
            timeout=timeout, headers=headers, trust_env=True
        ) as session:
            failures = 0
            if not self._model:
                found, failures = await self._repeated(lambda: self._agreed_model(session))
                self._model = found or ""
            slots = asyncio.Semaphore(CONCURRENT_CALLS)
            tasks = [
                asyncio.ensure_future(self._of_branch(session, ids, is_response, slots))
                for ids, is_response in _branches(group)
            ]
            try:
                answers = await asyncio.gather(*tasks)
            finally:
                for task in tasks:  # the others, where one has failed for good
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        values = [np.empty(0, np.float32), *(values for values, _ in answers)]
        failures += sum(each for _, each in answers)
        seconds = np.array([time.perf_counter() - began])
        return Judged(np.concatenate(values), failures, seconds)

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

    async def _of_branch(
        self,
        session: ClientSession,
        ids: np.ndarray,
        is_response: np.ndarray,
        slots: asyncio.Semaphore,
    ) -> tuple[np.ndarray, int]:
        """The log-probs of its response tokens, and how many calls failed."""
        found, failures = None, 0
        if self._model:  # nobody knows its name where that call failed for good
            async with slots:
                call = partial(self._logprobs, session, ids, is_response)
                found, failures = await self._repeated(call)
        if found is None:
            found = np.full(int(is_response.sum()), np.nan, np.float32)
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
    ) -> np.ndarray:
        tokens = ids.tolist()
        given = {"model": self._model, "prompt": tokens, "max_tokens": 1, "prompt_logprobs": 0}
        answer = await self._asked(session, "POST", f"{self.url}/completions", given)
        entries = answer["choices"][0]["prompt_logprobs"]
        if len(entries) != len(tokens):
            raise ValueError(f"log-probs of {len(entries)} tokens for {len(tokens)}")
        values = []
        for number in is_response.nonzero()[0].tolist():
            value = float(entries[number][str(tokens[number])]["logprob"])
            if not math.isfinite(value):
                raise ValueError(f"a log-prob of {value}")
            values.append(value)
        return np.array(values, np.float32)

    async def _asked(self, session: ClientSession, method: str, url: str, given: Any = None) -> Any:
        async with session.request(method, url, json=given) as response:
            text = await response.text()
            if response.status in _USERS_MISTAKES:
                raise RewardError(f"{self.name}: {url} says {response.status}: {text[:500]}")
            if response.status != 200:
                raise ConnectionError(f"{url} says {response.status}: {text[:500]}")
            return await response.json()


def _branches(group: RolloutGroup) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the tokens of each branch, in order, and which of them are of the response."""
    found, end = [], 0
    rows = zip(group.prompt_lengths.tolist(), group.response_lengths.tolist(), strict=True)
    for prompt, response in rows:
        start, end = end, end + prompt + response
        ids = group.tokens[start:end]
        if group.in_response is None:
            kinds = np.arange(prompt + response) >= prompt
        else:
            kinds = group.in_response[start:end]
        # a branch begins where a prompt follows a response
        cuts = np.flatnonzero(~kinds[1:] & kinds[:-1]) + 1
        found += zip(np.split(ids, cuts), np.split(kinds, cuts), strict=True)
    return found
