"""Parts: responses to one prompt that one server draws for one request.

A request costs the service more than all that it does with the response. So a group, or as much of
it as a server has room for, is one request, where the server has our middleware; of other servers
each response is a part of its own. Every response stays a `Flight` of its own: it arrives when it
has ended, may be taken back alone, and of a part that fails only the missing ones are drawn again.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from gspo_megatron.rollout.vllm.client import ServerGone
from gspo_megatron.rollout.vllm.flight import Flight
from gspo_megatron.rollout.vllm.server import Server
from gspo_megatron.rollout.vllm.worker.gspo_vllm_answers import (
    ModelFacts,
    Response,
    seed_of,
)

Seed = Sequence[int] | None  # numbers for `seed_of`; None: the sampling has what it needs


@dataclass(frozen=True)
class Wanted:
    """Responses that somebody waits for."""

    prompt: Sequence[int]
    sampling: Mapping[str, object]  # vLLM's SamplingParams
    version: int  # of the weights, or a later one
    draw: str  # those of earlier names go first
    routes: bool
    facts: ModelFacts
    salt: str | None = None


@dataclass(eq=False)
class Part:
    """Begins when it is made. `leave` ends it, at any time."""

    server: Server
    wanted: Wanted
    seeds: Sequence[Seed]  # of each response
    draw_again: Callable[[Seed], asyncio.Task[list[Response]]]
    when_some_end: Callable[[], None]
    flights: list[Flight] = field(default_factory=list)
    again: dict[int, asyncio.Task[list[Response]]] = field(default_factory=dict)  # by number

    def __post_init__(self) -> None:
        assert self.server.version is not None, "a server that serves nothing"
        self.life = self.server.restarts  # of the server
        stem = uuid.uuid4().hex[:24]
        self.call = asyncio.create_task(self._receive())
        for number in range(len(self.seeds)):
            flight = Flight(self.server.version, name=f"{stem}{number:08x}", call=self.call)
            flight.when_taken_back = self._taken_back
            self.flights.append(flight)
        self.server.depart(self.flights)

    def leave(self) -> None:
        """Nobody waits for it any more."""
        self.call.cancel()
        self.land()
        for task in self.again.values():
            task.cancel()

    def land(self) -> None:
        """Its server has nothing of it any more."""
        self.server.land(self.flights)
        self.when_some_end()

    def missing(self) -> list[int]:
        """Numbers of those that have not arrived, or with weights that the server has not proven;
        without those that are drawn again already."""
        is_same = self.server.restarts == self.life
        return [
            number
            for number, flight in enumerate(self.flights)
            if not flight.is_taken_back
            and not (
                flight.response is not None and is_same and flight.version <= self.server.proven
            )
        ]

    def newest(self) -> int:
        """The newest weights of what has arrived."""
        return max((each.version for each in self.flights if each.response is not None), default=-1)

    async def _receive(self) -> None:
        """Raises ServerGone or ServerRefused; what has arrived by then stays."""
        client, wanted, names = (
            self.server.client,
            self.wanted,
            [each.name for each in self.flights],
        )
        if not self.server.abilities.gives_parts:
            [name], [seed] = names, self.seeds
            sampling = (
                wanted.sampling if seed is None else {**wanted.sampling, "seed": seed_of(seed)}
            )
            response = await client.generate(
                wanted.prompt,
                sampling,
                wanted.facts,
                seconds=None,
                routes=wanted.routes,
                name=name,
                salt=wanted.salt,
            )
            self._arrived([(0, response)])
            return
        answers = client.generate_part(
            wanted.prompt,
            wanted.sampling,
            names,
            self.seeds,
            wanted.facts,
            routes=wanted.routes,
            salt=wanted.salt,
        )
        async with aclosing(answers):
            async for ended in answers:
                self._arrived(ended)
                if self.again and not self._is_under_way():
                    return  # it waits for no others: those that were taken back end with it
        if any(each.response is None and not each.is_taken_back for each in self.flights):
            raise ServerGone("an answer that lacks responses of a part")

    def _arrived(self, ended: Sequence[tuple[int, Response]]) -> None:
        self.server.heard = time.monotonic()
        for number, response in ended:
            if not 0 <= number < len(self.flights) or self.flights[number].response is not None:
                raise ServerGone(f"an answer with a response {number} that nobody asked for")
            if not self.flights[number].is_taken_back:
                self.flights[number].arrive(response)
        self.server.land(self.flights[number] for number, _ in ended)
        self.when_some_end()

    def _taken_back(self, flight: Flight) -> None:
        number = self.flights.index(flight)
        self.again[number] = self.draw_again(self.seeds[number])
        self.server.land([flight])
        if not self._is_under_way():
            self.call.cancel()

    def _is_under_way(self) -> bool:
        return not self.server.in_flight.isdisjoint(self.flights)
