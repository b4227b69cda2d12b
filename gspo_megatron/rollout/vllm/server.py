"""The rollout service's view of one server: its weights, requests, load and health."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from gspo_megatron.process.coroutines import BusySeconds
from gspo_megatron.rollout.vllm.checks import Abilities, Needs
from gspo_megatron.rollout.vllm.client import MODEL, ServerClient
from gspo_megatron.rollout.vllm.in_flight import InFlightResponse
from gspo_megatron.rollout.vllm.process import ServerProcess
from gspo_megatron.rollout.vllm.remote import RemoteProcess
from gspo_megatron.rollout.vllm.worker.gspo_vllm_answers import ModelFacts

Process = ServerProcess | RemoteProcess

# The largest number of requests in flight to one engine of a server. It is large, because vLLM's
# scheduler works best with a queue.
MOST_REQUESTS = 512
FEWEST_REQUESTS = 8  # the number never falls below this, even with a full cache
_SHRINKS_BY = 0.75
_GROWS_BY = 1 / 32  # share of the maximum that is added in an adjustment
_FULL, _FILLING = 0.97, 0.85  # used shares of the KV cache


@dataclass(frozen=True)
class FleetSettings:
    """Settings of the run that apply to all servers."""

    facts: ModelFacts
    needs: Needs
    restarts: int
    update_seconds: float
    silence_seconds: float
    max_staleness: int = 0  # if above 0, new weights arrive while responses are in progress
    keeps_kv: bool = False  # whether responses in progress then keep their keys and values
    # The Hugging Face folder with which servers start, if new weights are adapters of this model.
    # None: new weights are whole models.
    base: str | None = None

    def model(self, version: int) -> str | None:
        """Return the name that requests give for a weights version. None: requests ask for the
        model itself.

        Each version has a name of its own, because vLLM keys its prefix cache by the adapter's
        name.
        """
        return None if self.base is None else f"{MODEL}-{version}"

    def salt(self, version: int) -> str | None:
        """Return the cache salt of a weights version.

        vLLM clears its prefix cache for each version, unless responses in progress still use it.
        Then the salt separates the versions.
        """
        return str(version) if self.keeps_kv else None


class RequestWindow:
    """The limit of requests in flight to a server.

    The limit falls after preemptions or with a full KV cache. It rises slowly while the cache has
    room.
    """

    def __init__(self, most: int = MOST_REQUESTS) -> None:
        self.most = self.size = most
        self._preemptions = 0.0

    def adjust(self, figures: Mapping[str, float], in_flight: int) -> None:
        """Adapt the limit. figures: vLLM's own metrics."""
        usage = figures.get("kv_cache_usage_perc", 0.0)
        count = figures.get("num_preemptions_total", 0.0)
        preempted, self._preemptions = count > self._preemptions, count
        # New weights also preempt all requests (`kv_after_update: recompute`), even if the cache is
        # nearly empty. So preemptions count only if the cache is at least nearly full.
        if usage >= (_FILLING if preempted else _FULL):
            # If more requests than the limit are in flight, the last reduction has had no effect
            # yet.
            if in_flight <= self.size:
                fewer = int(in_flight * _SHRINKS_BY)
                self.size = min(self.size, max(fewer, FEWEST_REQUESTS))
        elif usage < _FILLING and in_flight >= self.size:
            self.size = min(self.most, self.size + max(1, int(self.most * _GROWS_BY)))


@dataclass(eq=False)
class Server:
    """The state of one server."""

    name: str  # for messages and logs
    client: ServerClient
    # A function that starts the server with a folder of weights. None: this run does not start it.
    start: Callable[[str], Process] | None = None
    process: Process | None = None
    # weights version with which the server was checked; None: the server gets no requests
    version: int | None = None
    why_out: str | None = "has not started yet"
    checked_version: int = -1  # newest version with which the server passed the check
    # The same for each of its processes, by `restarts`.
    proven: dict[int, int] = field(default_factory=dict)
    reports_versions: bool = False  # whether answers name the weights version of each token
    adapters: set[int] = field(default_factory=set)  # versions that are loaded as adapters
    in_flight: set[InFlightResponse] = field(default_factory=set)
    expected: int = 0  # requests that are about to be sent to the server
    window: RequestWindow = field(default_factory=RequestWindow)
    busy: BusySeconds = field(default_factory=BusySeconds)  # time with requests
    # time with requests or new weights
    working: BusySeconds = field(default_factory=BusySeconds)
    restarts: int = 0
    failures: int = 0  # restarts that count, see `Fleet._restart`
    abilities: Abilities = field(default_factory=Abilities)
    # Key of the process group in which rank 0 sends weights to the server. None: no weights are
    # awaited.
    stream_key: str | None = None
    stream_failed: bool = False  # if True, the server gets weights only in folders from now on
    tokens: float = 0.0  # tokens generated so far, by the server's own count
    kv_usage: float = 0.0  # share of the server's KV cache in use
    heard: float = 0.0  # time of the server's last answer or token
    load_seconds: float = 0.0  # how long the server was paused to load the newest weights
    check_seconds: float = 0.0
    bringing: asyncio.Task[None] | None = None  # the server's start, restart or update

    @property
    def serves(self) -> bool:
        return self.version is not None

    @property
    def may_come_back(self) -> bool:
        return self.bringing is not None and not self.bringing.done()

    @property
    def load(self) -> int:
        """The number of requests that the server has or is about to get."""
        return len(self.in_flight) + self.expected

    @property
    def can_stream(self) -> bool:
        return self.abilities.can_stream and not self.stream_failed

    def add_in_flight(self, responses: Collection[InFlightResponse]) -> None:
        """Count these responses as requests of this server. There must be at least one."""
        self.in_flight.update(responses)
        self.busy.begin(len(responses))
        self.working.begin(len(responses))

    def remove_in_flight(self, responses: Iterable[InFlightResponse]) -> None:
        """Stop counting these responses. Some of them may have been removed already."""
        ended = self.in_flight.intersection(responses)
        if ended:
            self.in_flight -= ended
            self.busy.end(len(ended))
            self.working.end(len(ended))

    def cancel_requests(self) -> None:
        """Cancel all requests of this server. Their responses are generated again."""
        for call in {response.call for response in self.in_flight}:
            assert call is not None
            call.cancel()
