"""One server, as the rollout service sees it: what it has, how much it may get, how it is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from gspo_megatron.rollout.vllm.checks import Abilities, Needs
from gspo_megatron.rollout.vllm.client import MODEL, ServerClient
from gspo_megatron.rollout.vllm.in_flight import InFlightResponse
from gspo_megatron.rollout.vllm.process import ServerProcess
from gspo_megatron.rollout.vllm.remote import RemoteProcess
from gspo_megatron.rollout.vllm.worker.gspo_vllm_answers import ModelFacts

Process = ServerProcess | RemoteProcess

MOST_REQUESTS = 512  # on their way to one server: its scheduler likes a queue
FEWEST_REQUESTS = 8  # however full its cache is
_SHRINKS_BY = 0.75
_GROWS_BY = 1 / 32  # of the most, at each look
_FULL, _FILLING = 0.97, 0.85  # shares of the cache


@dataclass(frozen=True)
class FleetSettings:
    """Settings of the run, for all servers."""

    facts: ModelFacts
    needs: Needs
    restarts: int
    update_seconds: float
    silence_seconds: float
    max_staleness: int = 0  # above 0, new weights come while responses are under way
    keeps_kv: bool = False  # and these go on with what the old weights made of their tokens
    # The Hugging Face folder that servers start with and keep: new weights are adapters of it.
    # None: new weights are whole models.
    base: str | None = None

    def model(self, version: int) -> str | None:
        """The name by which requests ask for a version; None: there is but one at a time. A name
        of its own for each version: vLLM keeps what it remembers of prompts by the adapter's
        name."""
        return None if self.base is None else f"{MODEL}-{version}"

    def salt(self, version: int) -> str | None:
        """The cache salt of a version. vLLM forgets its prefix cache with each version, unless
        responses under way still use it: then the salt keeps the versions apart."""
        return str(version) if self.keeps_kv else None


class RequestWindow:
    """How many requests may be on their way to a server: fewer after it had to preempt some or
    with a full cache, and slowly more while its cache has room."""

    def __init__(self, most: int = MOST_REQUESTS) -> None:
        self.most = self.size = most
        self._preemptions = 0.0

    def adjust(self, figures: Mapping[str, float], in_flight: int) -> None:
        """figures: vLLM's own metrics."""
        usage = figures.get("kv_cache_usage_perc", 0.0)
        count = figures.get("num_preemptions_total", 0.0)
        preempted, self._preemptions = count > self._preemptions, count
        # New weights preempt all requests, too (`kv_after_update: recompute`), in any cache.
        if usage >= (_FILLING if preempted else _FULL):
            # it has been told already, unless requests have become as few as that
            if in_flight <= self.size:
                fewer = int(in_flight * _SHRINKS_BY)
                self.size = min(self.size, max(fewer, FEWEST_REQUESTS))
        elif usage < _FILLING and in_flight >= self.size:
            self.size = min(self.most, self.size + max(1, int(self.most * _GROWS_BY)))


@dataclass
class Clock:
    """Seconds in which at least one thing was under way."""

    now: Callable[[], float] = time.monotonic
    _before: float = 0.0  # until the last time that nothing was
    _since: float = 0.0
    _under_way: int = field(default=0)

    def begin(self, count: int = 1) -> None:
        if not self._under_way:
            self._since = self.now()
        self._under_way += count

    def end(self, count: int = 1) -> None:
        self._under_way -= count
        assert self._under_way >= 0, "more ends than beginnings"
        if not self._under_way:
            self._before += self.now() - self._since

    @property
    def seconds(self) -> float:
        return self._before + (self.now() - self._since if self._under_way else 0.0)


@dataclass(eq=False)
class Server:
    """One server."""

    name: str  # for messages and logs
    client: ServerClient
    start: Callable[[str], Process] | None = None  # of a folder of weights; None: not ours
    process: Process | None = None
    version: int | None = None  # of its weights, which are checked; None: it serves nothing
    why_out: str | None = "has not started yet"
    checked_version: int = -1  # the newest version that it had and that passed the check
    reports_versions: bool = False  # which weights drew which tokens
    adapters: set[int] = field(default_factory=set)  # versions that it has loaded as adapters
    in_flight: set[InFlightResponse] = field(default_factory=set)
    expected: int = 0  # requests that are about to be sent to it
    window: RequestWindow = field(default_factory=RequestWindow)
    busy: Clock = field(default_factory=Clock)  # with requests
    working: Clock = field(default_factory=Clock)  # with requests or new weights
    restarts: int = 0
    abilities: Abilities = field(default_factory=Abilities)
    stream_key: str | None = None  # of its group with rank 0, while that sends it weights
    stream_failed: bool = False  # it gets its weights in folders from then on
    tokens: float = 0.0  # drawn so far, by its own count
    kv_usage: float = 0.0  # share of its cache in use
    heard: float = 0.0  # when it last answered or drew a token
    load_seconds: float = 0.0  # of its newest weights: it stood still
    check_seconds: float = 0.0
    bringing: asyncio.Task[None] | None = None  # its start, restart or update

    @property
    def serves(self) -> bool:
        return self.version is not None

    @property
    def may_come_back(self) -> bool:
        return self.bringing is not None and not self.bringing.done()

    @property
    def load(self) -> int:
        """Requests that it has, or gets in a moment."""
        return len(self.in_flight) + self.expected

    @property
    def can_stream(self) -> bool:
        return self.abilities.can_stream and not self.stream_failed

    def add_in_flight(self, responses: Collection[InFlightResponse]) -> None:
        """Count these as requests of this server: at least one."""
        self.in_flight.update(responses)
        self.busy.begin(len(responses))
        self.working.begin(len(responses))

    def remove_in_flight(self, responses: Iterable[InFlightResponse]) -> None:
        """Count these no longer. Some of them may have been removed before."""
        ended = self.in_flight.intersection(responses)
        if ended:
            self.in_flight -= ended
            self.busy.end(len(ended))
            self.working.end(len(ended))
