"""Asks teachers behind a URL for their log-probs of the tokens that the policy has written, and for
their most probable tokens at these positions.

A server is vLLM, or another server with the same `prompt_logprobs` and `/tokenize`. Its model may
have any shape, but must have the policy's tokenizer. Each branch of a response is sent whole, as
token ids. The teacher's temperature is always 1: servers compute prompt_logprobs at no other
temperature.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from gspo_megatron.addresses import keyed_session
from gspo_megatron.config.distillation import DistillationSection
from gspo_megatron.config.schema import RewardSection
from gspo_megatron.errors import DataError, RewardError, some_of
from gspo_megatron.process.coroutines import BusySeconds, run_together
from gspo_megatron.rewards.values import shorten
from gspo_megatron.rollout.asking import Asker
from gspo_megatron.rollout.types import RolloutGroup
from gspo_megatron.types import Prompt

if TYPE_CHECKING:
    from aiohttp import ClientSession

    from gspo_megatron.data.tokenizers import Tokenizer

# environment variable with the server's API key; the reward llm_judge reads it too
KEY_VARIABLE = "OPENAI_API_KEY"
_LENGTH_OF_LIST = "--max-logprobs"  # vLLM's option: the most log-probs to return for a token


# The teacher of each prompt


def teacher_number(section: DistillationSection, prompt: Prompt) -> int:
    """Return the index of the prompt's teacher in `section.named`, or -1 if the prompt has none.
    Raises DataError if the prompt's row names no known teacher."""
    if section.field is None:
        return 0 if section.is_on else -1
    if section.field not in prompt.fields:
        wrong = f"the row has no field {section.field!r}"
        raise DataError(f"{prompt.source}: {wrong}, {_which(section)}")
    name, names = prompt.fields[section.field], [*section.teachers]
    if name not in names:
        known = ", ".join(names)
        raise DataError(
            f"{prompt.source}: {section.field} = {shorten(name)} names no teacher, "
            f"{_which(section)}; allowed: {known}; "
            "a teacher {} is for prompts without a teacher"
        )
    each = section.teachers[name]
    return -1 if each.teacher is None and each.url is None else names.index(name)


def _which(section: DistillationSection) -> str:
    return f"but objective.distillation.field = {section.field} needs one"


def check_teachers(section: DistillationSection, prompts: Iterable[Prompt]) -> None:
    """Raise DataError if some prompts name no known teacher. The error lists the first of these
    prompts."""
    problems = []
    for prompt in prompts if section.field is not None else ():
        try:
            teacher_number(section, prompt)
        except DataError as error:
            problems.append(str(error))
    if problems:
        raise DataError("\n".join(some_of(problems)))


# The answers of teachers


@dataclass
class _Answer:
    """A server's answer for the response tokens of a branch."""

    logprobs: np.ndarray  # [tokens] float32
    tokens: np.ndarray  # [tokens, k] int32
    top_logprobs: np.ndarray  # [tokens, k] float32

    @classmethod
    def all(cls, count: int, k: int, logprob: float) -> _Answer:
        nothing = np.full((count, k), -1, np.int32), np.full((count, k), -np.inf, np.float32)
        return cls(np.full(count, logprob, np.float32), *nothing)


class Teachers:
    """All teachers of a run. Asks the teachers behind a URL. The section `reward` sets the deadline
    of a call."""

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
        self._busy = BusySeconds()

    async def judge(self, group: RolloutGroup, prompts: Mapping[int, Prompt]) -> int:
        """Ask the servers about the responses of a group, and write the answers into its columns.

        The log-prob is NaN in a response whose call failed for good, and 0 in a response that no
        server judges. prompts: by their numbers in the step. Returns the number of failed calls,
        including those that were repeated later. Raises RewardError for mistakes of the user, and
        for a call that failed for good if `reward.on_failure` is `stop`.
        """
        if self.section.field is not None:
            numbers = group.group_index.tolist()
            of_prompt = {n: teacher_number(self.section, prompts[n]) for n in {*numbers}}
            group.teachers = np.array([of_prompt[n] for n in numbers], np.int32)
        if not self.servers:
            return 0
        with self._busy.running():
            answers, failures = await self._ask(group)
        group.teacher_seconds = np.array([self._busy.take()])
        answers = [_Answer.all(0, self.k, 0.0), *answers]
        group.teacher_logprobs = np.concatenate([each.logprobs for each in answers])
        if self.k:
            group.teacher_tokens = np.concatenate([each.tokens for each in answers])
            group.teacher_top_logprobs = np.concatenate([each.top_logprobs for each in answers])
        return failures

    async def _ask(self, group: RolloutGroup) -> tuple[list[_Answer], int]:
        """Return the teacher's answer for each branch, and the number of failed calls."""
        branches, numbers = _branches(group), group.teachers
        servers = [
            self.servers.get(0 if numbers is None else int(numbers[row])) for row, *_ in branches
        ]
        async with AsyncExitStack() as opened:
            sessions, failures = {}, 0
            for server in (each for each in self.servers.values() if each in servers):
                session = keyed_session(server.url, KEY_VARIABLE, self._timeout_seconds)
                sessions[server] = await opened.enter_async_context(session)
                failures += await server.find_model_name(sessions[server])
            answers = iter(
                await run_together(
                    server.of_branch(sessions[server], ids, is_response)
                    for server, (_, ids, is_response) in zip(servers, branches, strict=True)
                    if server is not None
                )
            )
        result = []
        for server, (_, _, is_response) in zip(servers, branches, strict=True):
            if server is None:
                result.append(_Answer.all(int(is_response.sum()), self.k, 0.0))
                continue
            answer, failed = next(answers)
            result.append(answer)
            failures += failed
        return result, failures


class _Server(Asker):
    """The server of one teacher."""

    longest_answer = 1 << 32  # up to a thousand log-probs for each token

    def __init__(
        self, name: str, url: str, k: int, reward: RewardSection, tokenizer: Tokenizer
    ) -> None:
        """name: configuration key and URL of the server, for messages; k: the number of most
        probable tokens to ask for."""
        super().__init__(name, reward)
        self.url, self.k, self.tokenizer = url.rstrip("/"), k, tokenizer

    async def checked_model_name(self, session: ClientSession) -> str:
        """See Asker."""
        model = (await self.request_json(session, "GET", f"{self.url}/models"))["data"][0]["id"]
        tokenize = f"{self.url.removesuffix('/v1')}/tokenize"
        if not await self.has_tokenizer(session, tokenize, model, self.tokenizer):
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
    ) -> tuple[_Answer, int]:
        """Return the server's answer for a branch, and the number of failed calls."""
        answer, failures = None, 0
        if self.model:  # it is empty if the call for the name failed for good
            async with self.slots:
                call = partial(self._logprobs, session, ids, is_response)
                answer, failures = await self.with_retries(call)
        if answer is None:
            answer = _Answer.all(int(is_response.sum()), self.k, math.nan)
        return answer, failures

    async def _logprobs(
        self, session: ClientSession, ids: np.ndarray, is_response: np.ndarray
    ) -> _Answer:
        tokens = ids.tolist()
        content = {
            "model": self.model,
            "prompt": tokens,
            "max_tokens": 1,
            "prompt_logprobs": self.k,
        }
        answer = await self.request_json(session, "POST", f"{self.url}/completions", content)
        entries = answer["choices"][0]["prompt_logprobs"]
        if len(entries) != len(tokens):
            raise ValueError(f"log-probs of {len(entries)} tokens for {len(tokens)}")
        places = is_response.nonzero()[0].tolist()
        result = _Answer.all(len(places), self.k, math.nan)
        for row, number in enumerate(places):
            entry = {int(token): float(each["logprob"]) for token, each in entries[number].items()}
            for value in entry.values() if self.k else (entry[tokens[number]],):
                if not math.isfinite(value):
                    raise ValueError(f"a log-prob of {value}")
            result.logprobs[row] = entry[tokens[number]]
            # an entry has k + 1 tokens if the token written is not among the k most probable
            best = sorted(entry.items(), key=lambda each: -each[1])[: self.k]
            if len(best) < self.k:
                raise ValueError(f"{len(best)} most probable tokens for top_k = {self.k}")
            if best:
                result.tokens[row], result.top_logprobs[row] = zip(*best)
        return result

    def advice(self, status: int, text: str) -> str | None:
        """Say how to start a server that refused to return the `k` most probable tokens."""
        if status != 400 or not self.k or "logprobs" not in text:
            return None
        return f"start it with {_LENGTH_OF_LIST} {self.k}, or lower top_k"


def _branches(group: RolloutGroup) -> list[tuple[int, np.ndarray, np.ndarray]]:
    """List the branches in order: the row of the response, the branch's tokens, and a mask of the
    tokens that belong to the response."""
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
