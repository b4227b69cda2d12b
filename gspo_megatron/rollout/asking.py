"""Calls to the servers of teachers and reward models. Failed calls are repeated."""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

from gspo_megatron.addresses import read_answer, wait_as_told
from gspo_megatron.config.schema import RewardSection
from gspo_megatron.errors import RewardError, printable, tell
from gspo_megatron.process.heartbeat import heartbeat
from gspo_megatron.rewards.scoring import CONCURRENT_CALLS, FIRST_WAIT_SECONDS

if TYPE_CHECKING:
    from aiohttp import ClientSession

    from gspo_megatron.data.tokenizers import Tokenizer

_T = TypeVar("_T")
_USERS_MISTAKES = (401, 403, 404, 405)
# If two tokenizers make the same tokens of this text, they almost surely belong to the same model.
PROBE = "Ünïcode, 12 + 34 = 46;\n\tthe end, 終わり. {}[]"


class Asker(ABC):
    """Calls one server. The section `reward` says how often a failed call is repeated (`retries`)
    and what happens if the last call fails too (`on_failure`).

    A rollout service scores many groups at the same time, so calls for different groups share
    the slots and the search for the model's name.
    """

    longest_answer = 1 << 26  # bytes

    def __init__(self, name: str, reward: RewardSection) -> None:
        """name: configuration key and URL of the server, for messages."""
        self.name, self.reward = name, reward
        self.model = ""  # the model's name on the server; empty: not known yet
        self.slots = asyncio.Semaphore(CONCURRENT_CALLS)  # for the requests of all groups
        self._name_lock, self._name_searches = asyncio.Lock(), 0
        self._has_warned = False  # whether a message about failed calls has been printed

    @abstractmethod
    async def checked_model_name(self, session: ClientSession) -> str:
        """Return the model's name on the server. Raises RewardError if the server has another
        tokenizer."""

    async def find_model_name(self, session: ClientSession) -> int:
        """Ask for the model's name, unless it is known. Returns the number of failed calls.

        If another group is asking at this moment, its answer counts for this group too, even if
        its calls fail for good.
        """
        before = self._name_searches
        async with self._name_lock:
            if self.model or self._name_searches != before:
                return 0
            name, failures = await self.with_retries(lambda: self.checked_model_name(session))
            self.model, self._name_searches = name or "", before + 1
            return failures

    async def has_tokenizer(
        self, session: ClientSession, url: str, model: str, tokenizer: Tokenizer
    ) -> bool:
        """Return whether the server's model has this tokenizer. url: of the path /tokenize."""
        content = {"model": model, "prompt": PROBE, "add_special_tokens": False}
        theirs = (await self.request_json(session, "POST", url, content))["tokens"]
        return theirs == tokenizer.encode(PROBE)

    async def with_retries(self, call: Callable[[], Awaitable[_T]]) -> tuple[_T | None, int]:
        """Repeat a call until it succeeds. Returns its result and the number of failed calls.

        The result is None if all calls failed and `reward.on_failure` does not end the run.
        """
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
            if not self._has_warned:
                self._has_warned = True
                more = "further failures are only counted"
                tell(printable(f"{what}; it is asked again; {more}"))
            await asyncio.sleep(FIRST_WAIT_SECONDS * 2 ** (tries - 1))

    async def request_json(
        self, session: ClientSession, method: str, url: str, content: Any = None
    ) -> Any:
        """Send a request and return the JSON answer. Raises RewardError for a mistake of the user,
        and other errors if `with_retries` should ask again."""
        async with session.request(method, url, json=content) as response:
            text = (await read_answer(response, self.longest_answer)).decode(errors="replace")
            if response.status in _USERS_MISTAKES:
                raise RewardError(f"{self.name}: {url} says {response.status}: {text[:500]}")
            if (advice := self.advice(response.status, text)) is not None:
                answer = f"{url} says {response.status}: {text[:500]}"
                raise RewardError(f"{self.name}: {answer}; {advice}")
            await wait_as_told(response)
            if response.status != 200:
                raise ConnectionError(f"{url} says {response.status}: {text[:500]}")
            return json.loads(text)

    def advice(self, status: int, text: str) -> str | None:
        """Return advice if the server's answer shows a mistake of the user; else None."""
        return None
