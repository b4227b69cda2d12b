"""Asks a language model at an OpenAI-compatible URL about responses, and caches its answers."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from gspo_megatron.addresses import keyed_session, read_answer, wait_as_told
from gspo_megatron.errors import RewardError
from gspo_megatron.files import write_atomically
from gspo_megatron.types import Sample

_T = TypeVar("_T")

POSITIVE = ("max_tokens", "seconds")  # options that must be above 0
# Number of questions in progress in each process. It is large enough to keep a server busy, and
# below the limit of open files.
CONCURRENT_QUESTIONS = 64

_PLACE = re.compile(r"\{(\w+)\}")
# Texts of control tokens of published models. If a response contains such a text, the judge's
# server could take it for the control token.
_CONTROL = re.compile(
    r"<(?=[|｜][^|｜<>\s]+[|｜]>|/?s>|(?:start|end)_of_turn>|(?:bos|eos|pad|unk)>)"
    r"|<(?=\|turn>|turn\||/?role>|seed:(?:bos|eos|pad)|sop>)"
    r"|\[(?=/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_RESULTS|TOOL_CALLS|TOOL_CONTENT|THINK)\])"
    r"|\[(?=\|[^|\[\]\s]+\|\]|(?:BOS|EOS|EOT|PAD|gMASK)\]|e~\[)|\](?=~!?b[\[\]])"
)
_BREAK = "\u200b"  # zero-width space
# With these HTTP statuses, every question would fail. The statuses 400, 413 and 422 are not in this
# list, because they may concern a single response, for example if it is too long for the judge or
# has characters that the server refuses.
_USERS_MISTAKES = (401, 403, 404, 405)

_SLOTS: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
    weakref.WeakKeyDictionary()
)


@dataclass(frozen=True)
class Question:
    """A question to the judge, and where its answer is kept."""

    request: dict[str, Any]
    name: str  # equal questions to one server have equal names
    path: Path | None  # the answer's file in the cache; None: no cache


@dataclass(frozen=True)
class JudgeServer:
    url: str
    model: str
    max_tokens: int
    seconds: float  # limit for one request
    cache: str  # the folder of the cache; empty: no cache
    key_variable: str

    def question(self, text: str) -> Question:
        request = {
            "model": self.model,
            "messages": [{"role": "user", "content": text}],
            "temperature": 0.0,
            "max_tokens": self.max_tokens,
        }
        key = json.dumps([self.url, request], sort_keys=True).encode()
        name = hashlib.sha256(key).hexdigest()
        path = Path(self.cache) / name[:2] / f"{name}.json" if self.cache else None
        return Question(request, name, path)

    async def ask(self, question: Question) -> str:
        """Ask the question; return the judge's answer.

        Raises RewardError for mistakes of the user (wrong URL, model or key), and ConnectionError
        or other errors if asking again may help.
        """
        url = f"{self.url.rstrip('/')}/chat/completions"
        async with (
            keyed_session(url, self.key_variable, self.seconds) as session,
            session.post(url, json=question.request) as response,
        ):
            text = (await read_answer(response)).decode(errors="replace")
            if response.status in _USERS_MISTAKES:
                raise RewardError(f"reward 'llm_judge': {url} says {response.status}: {text[:500]}")
            await wait_as_told(response)
            if response.status != 200:
                raise ConnectionError(f"{url} says {response.status}: {text[:500]}")
            return str(json.loads(text)["choices"][0]["message"]["content"] or "")


def settings_fault(url: str, template: str, responses: Sequence[str]) -> str | None:
    """Return what is wrong with the judge's URL or its template, or None.

    responses: the names by which the template must name the responses."""
    if not re.fullmatch(r"https?://[^/\s]+(/\S*)?", url):
        return f"reward.options.url = {url}: allowed: http://host:port/v1"
    if lacks := [f"{{{name}}}" for name in responses if f"{{{name}}}" not in template]:
        return f"reward.options.template: lacks {' and '.join(lacks)}, the text to judge"
    return None


def cached(question: Question, read: Callable[[str], _T | None]) -> _T | None:
    """Return what `read` finds in the cached answer, or None if the answer is missing or
    damaged."""
    if question.path is None:
        return None
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        return read(json.loads(question.path.read_text(encoding="utf-8"))["said"])
    return None


def keep(question: Question, answer: str, **others: Any) -> None:
    """Write an answer into the cache, if there is a cache. others: additional fields, for people to
    read."""
    if question.path is not None:
        write_atomically(question.path, json.dumps({"said": answer, **others}).encode())


def slots() -> asyncio.Semaphore:
    """Return the semaphore that limits the questions in progress in this event loop."""
    loop = asyncio.get_running_loop()
    return _SLOTS.setdefault(loop, asyncio.Semaphore(CONCURRENT_QUESTIONS))


def filled(template: str, sample: Sample, texts: Mapping[str, str]) -> str:
    """Put the fields of a sample and the responses into the template. texts: the responses, by
    their names in the template.

    Fields are filled in one pass, so "{answer}" inside a response stays unchanged. A zero-width
    space breaks control tokens in the texts. So a response cannot end its own message and write the
    judge's answer."""
    known = {**sample.fields, "prompt": sample.prompt, "answer": sample.answer, **texts}

    def text_of(place: re.Match[str]) -> str:
        if (name := place[1]) not in known:
            allowed = ", ".join(sorted(known))
            raise RewardError(f"reward.options.template: no {{{name}}}; allowed: {allowed}")
        value = known[name]
        # A Parquet file may have dates, which JSON lacks.
        as_json = json.dumps(value, ensure_ascii=False, default=str)
        text = value if isinstance(value, str) else as_json
        return _CONTROL.sub(lambda mark: mark[0] + _BREAK, text)

    return _PLACE.sub(text_of, template)
