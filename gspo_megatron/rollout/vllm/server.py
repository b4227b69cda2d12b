"""One server, as the rollout service sees it, and the weights on their way to it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gspo_megatron.rollout.vllm.checks import Abilities, Needs
from gspo_megatron.rollout.vllm.client import Client
from gspo_megatron.rollout.vllm.flight import Flight
from gspo_megatron.rollout.vllm.pacing import Clock, Window
from gspo_megatron.rollout.vllm.process import ServerProcess
from gspo_megatron.rollout.vllm.remote import RemoteProcess
from gspo_megatron.rollout.vllm.weight_check import WeightCheck
from gspo_megatron.rollout.vllm.worker.gspo_vllm_answers import ModelFacts

Process = ServerProcess | RemoteProcess


@dataclass(frozen=True)
class Weights:
    """A version of the policy's weights on its way to the servers."""

    version: int  # steps that the policy has made
    folder: str | None  # Hugging Face folder; None: not written until a server asks for it
    check: WeightCheck | None = None  # None: the trainer still computes it
    stream: Mapping[str, Any] | None = None  # WeightStream.plan: rank 0 sends them


@dataclass(frozen=True)
class PoolSettings:
    """Of the run, for all servers."""

    facts: ModelFacts
    needs: Needs
    restarts: int
    update_seconds: float
    silence_seconds: float
    max_staleness: int = 0  # above 0, new weights come while responses are under way
    keeps_kv: bool = False  # and these go on with what the old weights made of their tokens


@dataclass(eq=False)
class Server:
    """One server."""

    name: str  # for messages and logs
    client: Client
    start: Callable[[str], Process] | None = None  # of a folder of weights; None: not ours
    process: Process | None = None
    version: int | None = None  # proven; None: it serves nothing
    why_out: str | None = "has not started yet"
    proven: int = -1  # the newest version that it had and proved
    tells_versions: bool = False  # which weights drew which tokens
    in_flight: set[Flight] = field(default_factory=set)
    expected: int = 0  # requests that are about to be sent to it
    window: Window = field(default_factory=Window)
    busy: Clock = field(default_factory=Clock)  # with requests
    working: Clock = field(default_factory=Clock)  # with requests or new weights
    restarts: int = 0
    abilities: Abilities = field(default_factory=Abilities)
    receives: str | None = None  # while rank 0 sends it weights: their group's key
    wants_folders: bool = False  # because rank 0 failed to send it weights
    tokens: float = 0.0  # drawn so far, by its own count
    kv_usage: float = 0.0  # share of its cache in use
    heard: float = 0.0  # when it last answered or drew a token
    load_seconds: float = 0.0  # of its newest weights: it stood still
    check_seconds: float = 0.0
    tending: asyncio.Task[None] | None = None  # its start or restart

    @property
    def serves(self) -> bool:
        return self.version is not None

    @property
    def load(self) -> int:
        """Requests that it has, or gets in a moment."""
        return len(self.in_flight) + self.expected

    @property
    def can_stream(self) -> bool:
        return self.abilities.can_stream and not self.wants_folders

    def depart(self, flights: Collection[Flight]) -> None:
        """At least one."""
        self.in_flight.update(flights)
        self.busy.begin(len(flights))
        self.working.begin(len(flights))

    def land(self, flights: Iterable[Flight]) -> None:
        """They have ended, or this server has them no more. It may have some of them no more since
        before."""
        landed = self.in_flight.intersection(flights)
        if landed:
            self.in_flight -= landed
            self.busy.end(len(landed))
            self.working.end(len(landed))
