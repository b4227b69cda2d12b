"""A request for several responses to one prompt, sent to one server.

Sending a request costs the service more time than handling the responses to it. So if the server
has our middleware, a group, or the part for which the server has room, is one request. On other
servers each response is a separate request. Each response is an `InFlightResponse`: it arrives when
it has ended, and may be taken back (cancelled and generated again) without the others. If a request
fails, only its missing responses are generated again.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from gspo_megatron.rollout.vllm.client import ServerGone
from gspo_megatron.rollout.vllm.in_flight import InFlightResponse
from gspo_megatron.rollout.vllm.server import Server
from gspo_megatron.rollout.vllm.worker.gspo_vllm_answers import GroupPart, Response

Seed = Sequence[int] | None  # numbers for `seed_of`; None: add no seed to the sampling parameters


@dataclass(frozen=True)
class GroupSpec:
    """What is the same for all requests of a group."""

    part: GroupPart  # each request adds its names and seeds
    version: int  # lowest weights version that may generate
    rollout: str  # name of the RolloutRequest; requests are sent in the order of names


@dataclass(eq=False)
class GroupRequest:
    """A request to one server. Making the object sends it; `cancel` ends it at any time."""

    server: Server
    spec: GroupSpec
    seeds: Sequence[Seed]  # one for each response
    generate_again: Callable[[Seed], asyncio.Task[list[Response]]]
    when_some_end: Callable[[], None]
    responses: list[InFlightResponse] = field(default_factory=list)
    # Number of a response -> the task that generates this response again.
    again: dict[int, asyncio.Task[list[Response]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.server.version is not None, "a server that serves nothing"
        self.process_number = self.server.restarts  # the server may restart meanwhile
        stem = uuid.uuid4().hex[:24]
        self.call = asyncio.create_task(self._receive())
        for number in range(len(self.seeds)):
            name = f"{stem}{number:08x}"
            response = InFlightResponse(self.server.version, name=name, call=self.call)
            response.when_taken_back = self._taken_back
            self.responses.append(response)
        self.server.add_in_flight(self.responses)

    def cancel(self) -> None:
        """Cancel the request, and the responses that are generated again for it."""
        self.call.cancel()
        self.end()
        for task in self.again.values():
            task.cancel()

    def end(self) -> None:
        """Stop counting the responses as requests of the server."""
        self.server.remove_in_flight(self.responses)
        self.when_some_end()

    def missing(self) -> list[int]:
        """Return the numbers of the responses that must be generated again.

        They have not arrived, or the server has not passed the check of their weights. Responses
        that were taken back are not included.
        """
        newest = self.server.proven.get(self.process_number, -1)
        return [
            number
            for number, each in enumerate(self.responses)
            if not each.is_taken_back and not (each.answer is not None and each.version <= newest)
        ]

    def newest_version(self) -> int:
        """Return the newest weights version of the responses that have arrived, or -1 if no
        response has arrived."""
        arrived = (each.version for each in self.responses if each.answer is not None)
        return max(arrived, default=-1)

    async def _receive(self) -> None:
        """Receive the responses. Raises ServerGone or ServerRefused; responses that have arrived
        before are kept."""
        client, names = self.server.client, [each.name for each in self.responses]
        part = replace(self.spec.part, names=names, seeds=self.seeds)
        if not self.server.abilities.gives_parts:
            self._arrived([(0, await client.generate(part, seconds=None))])
            return
        answers = client.generate_part(part)
        async with aclosing(answers):
            async for ended in answers:
                self._arrived(ended)
                if self.again and not self._is_under_way():
                    return  # only responses that were taken back are left; closing cancels them
        if any(each.answer is None and not each.is_taken_back for each in self.responses):
            raise ServerGone("an answer that lacks responses of a part")

    def _arrived(self, ended: Sequence[tuple[int, Response]]) -> None:
        self.server.heard = time.monotonic()
        for number, answer in ended:
            if not 0 <= number < len(self.responses) or self.responses[number].answer is not None:
                raise ServerGone(f"an answer with a response {number} that nobody asked for")
            if not self.responses[number].is_taken_back:
                self.responses[number].arrive(answer)
        self.server.remove_in_flight(self.responses[number] for number, _ in ended)
        self.when_some_end()

    def _taken_back(self, response: InFlightResponse) -> None:
        number = self.responses.index(response)
        self.again[number] = self.generate_again(self.seeds[number])
        self.server.remove_in_flight([response])
        if not self._is_under_way():
            self.call.cancel()

    def _is_under_way(self) -> bool:
        return not self.server.in_flight.isdisjoint(self.responses)
