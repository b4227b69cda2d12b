"""Chooses the order of requests, and a server for each.

Requests wait in a queue until a server with the weights that they need has room. Requests of
earlier rollouts go first. Responses that a server loses are sent to other servers.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from gspo_megatron.errors import RolloutError
from gspo_megatron.process.coroutines import run_together
from gspo_megatron.rollout.vllm.client import ServerGone, ServerRefused
from gspo_megatron.rollout.vllm.fleet import Fleet
from gspo_megatron.rollout.vllm.group_request import GroupRequest, GroupSpec, Seed
from gspo_megatron.rollout.vllm.server import FleetSettings, Server
from gspo_megatron.rollout.vllm.worker.gspo_vllm_answers import GroupPart, Response

_WORTH = 16  # a server gets a part of a group only if 1 / _WORTH of its places are free


@dataclass(eq=False)
class QueueEntry:
    """A queued request for `places`. `granted` gets (server, places) pairs with 1 to `places`
    places in total."""

    key: tuple[str, int]
    places: int
    granted: asyncio.Future[list[tuple[Server, int]]]
    is_waiting: bool = True


class RequestQueue:
    """Requests that wait for a server. Requests of earlier rollouts go first."""

    def __init__(self) -> None:
        # by (rollout, lowest weights version)
        self._waiting: dict[tuple[str, int], deque[QueueEntry]] = {}
        self.places = 0  # total of all waiting requests

    def add(self, rollout: str, version: int, places: int, *, first: bool = False) -> QueueEntry:
        """Add a request. Rollouts are served in the order of their names.

        first: put it before the other requests of its rollout.
        """
        granted: asyncio.Future[list[tuple[Server, int]]]
        granted = asyncio.get_running_loop().create_future()
        entry = QueueEntry((rollout, version), places, granted)
        entries = self._waiting.setdefault(entry.key, deque())
        entries.appendleft(entry) if first else entries.append(entry)
        self.places += places
        return entry

    def remove(self, entry: QueueEntry) -> None:
        """Remove an entry, if it still waits."""
        if entry.is_waiting:
            entry.is_waiting = False
            self._waiting[entry.key].remove(entry)
            self.places -= entry.places

    def admit(self, choose: Callable[[int, float, int], tuple[Server, int] | None]) -> None:
        """Grant places while `choose` finds a server.

        choose(version, reserved_from, places) gets three numbers: the lowest weights version for
        the request, the version from which on servers are reserved for earlier rollouts, and the
        number of places that the request still needs. Errors of `choose` are raised in the waiting
        task. A rollout does not delay later rollouts while it needs a version that no server has
        yet.
        """
        reserved_from = math.inf
        for key in sorted(self._waiting):
            entries, version = self._waiting[key], key[1]
            while entries and self._grant(entries, partial(choose, version, reserved_from)):
                pass
            if entries:
                reserved_from = min(reserved_from, version)
            else:
                del self._waiting[key]

    def _grant(
        self,
        entries: deque[QueueEntry],
        choose: Callable[[int], tuple[Server, int] | None],
    ) -> bool:
        """Give the first entry all places that `choose` finds. Returns False if it finds none."""
        entry, granted = entries[0], []
        if entry.granted.done():  # cancelled
            self.remove(entry)
            return True
        try:
            needed = entry.places
            while needed and (grant := choose(needed)) is not None:
                granted.append(grant)
                needed -= grant[1]
        except Exception as error:  # noqa: BLE001 (raised where it is awaited)
            self.remove(entry)
            entry.granted.set_exception(error)
            return True
        if granted:
            self.remove(entry)
            entry.granted.set_result(granted)
        return bool(granted)


class Scheduler:
    """Generates responses on the servers of a fleet."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.resubmitted = 0  # responses sent again because a server lost them
        self._queue = RequestQueue()
        self._admits_soon = False
        self._level = 0  # mean load of the servers if all waiting requests were sent
        fleet.changes.when_changed = self._admit_soon

    @property
    def settings(self) -> FleetSettings:
        return self.fleet.settings

    async def generate_all(
        self,
        prompt: Sequence[int],
        sampling: Mapping[str, Any],
        seeds: Sequence[Seed],
        version: int,
        rollout: str = "",
    ) -> list[Response]:
        """Generate a response for each seed, on the servers with the fewest requests.

        version: the lowest weights version; newer weights may arrive during a response. Rollouts
        whose names sort first are sent first. Raises RolloutError if no server is left, or if a
        server refuses the request.
        """
        routes = self.settings.needs.with_routes and sampling["temperature"] > 0
        part = GroupPart(prompt, sampling, self.settings.facts, routes)
        return await self._generate(GroupSpec(part, version, rollout), seeds)

    async def _generate(
        self, spec: GroupSpec, seeds: Sequence[Seed], *, first: bool = False
    ) -> list[Response]:
        """Send requests when places are granted. first: put the requests before the other requests
        of the rollout."""
        requests: list[GroupRequest] = []
        remaining = seeds
        try:
            for server, places in await self._wait_for_places(spec, len(seeds), first=first):
                requests.append(self._send_request(server, spec, remaining[:places]))
                remaining = remaining[places:]
            parts = [self._whole_group(request) for request in requests]
            if remaining:
                parts.append(self._generate(spec, remaining, first=True))
            return list(itertools.chain(*await run_together(parts)))
        finally:
            for request in requests:
                request.cancel()

    def _send_request(self, server: Server, spec: GroupSpec, seeds: Sequence[Seed]) -> GroupRequest:
        def generate_again(seed: Seed) -> asyncio.Task[list[Response]]:
            return asyncio.create_task(self._generate(spec, [seed], first=True))

        assert server.version is not None, "_wait_for_places gives servers that serve"
        salt, model = self.settings.salt(server.version), self.settings.model(server.version)
        spec_here = replace(spec, part=replace(spec.part, salt=salt, model=model))
        return GroupRequest(server, spec_here, seeds, generate_again, self._admit_soon)

    async def _whole_group(self, request: GroupRequest) -> list[Response]:
        """Wait for all responses of a request. Responses that the server loses are generated
        again."""
        server = request.server
        await asyncio.wait([request.call])
        try:
            # The call is cancelled if the server is out of service, or if all responses were taken
            # back.
            if not request.call.cancelled():
                request.call.result()
        except ServerRefused as error:
            raise RolloutError(f"{server.name} refuses a request: {error}") from error
        except ServerGone as error:
            self.fleet.lose_server(server, str(error))
        request.end()
        await self._wait_for_check(server, request.newest_version())
        missing, regenerated = request.missing(), {}
        self.resubmitted += len(missing)
        if missing:
            seeds = [request.seeds[n] for n in missing]
            again = await self._generate(request.spec, seeds, first=True)
            regenerated = dict(zip(missing, again, strict=True))
        for number, task in request.again.items():
            [regenerated[number]] = await task
        answers = (each.answer for each in request.responses)
        responses = {n: answer for n, answer in enumerate(answers) if answer is not None}
        responses |= regenerated
        return [responses[n] for n in range(len(request.responses))]

    async def _wait_for_check(self, server: Server, version: int) -> None:
        """Wait until the server has passed the check of weights of `version` or later, or is out of
        service."""
        if server.checked_version < version:
            await self.fleet.changes.wait_until(
                lambda: server.checked_version >= version or server.why_out is not None
            )

    # Places

    async def _wait_for_places(
        self, spec: GroupSpec, places: int, *, first: bool
    ) -> list[tuple[Server, int]]:
        """Wait in the queue; returns servers and their numbers of places.

        The servers are in service when this method returns. So the caller must send its requests at
        once.
        """
        while True:
            entry = self._queue.add(spec.rollout, spec.version, places, first=first)
            self._admit_soon()
            try:
                granted = await entry.granted
            finally:
                self._queue.remove(entry)
                is_granted = entry.granted.done() and not entry.granted.cancelled()
                if is_granted and entry.granted.exception() is None:
                    for server, count in entry.granted.result():
                        # The caller sends these requests at once, or never.
                        server.expected -= count
            serving = [
                (server, count)
                for server, count in granted
                # the server may have stopped serving in between
                if server.version is not None and server.version >= spec.version
            ]
            if serving:
                return serving

    def _admit_soon(self) -> None:
        """Call `_admit` once for all changes in this turn of the event loop."""
        if self._queue.places and not self._admits_soon:
            self._admits_soon = True
            asyncio.get_running_loop().call_soon(self._admit)

    def _admit(self) -> None:
        """Grant places to the waiting requests."""
        self._admits_soon = False
        if self._queue.places:
            serving = [each for each in self.fleet.servers if each.version is not None]
            loads = sum(each.load for each in serving) + self._queue.places
            self._level = -(-loads // max(1, len(serving)))
            self._queue.admit(self._choose_server)

    def _choose_server(
        self, version: int, reserved_from: float, places: int
    ) -> tuple[Server, int] | None:
        """Choose the least loaded server with room, and its number of places; None: wait.

        A server gets at most its share of all waiting requests. It must have room for the whole
        group, or for a part that is large enough (`_WORTH`). Servers of version `reserved_from` or
        later are reserved for earlier rollouts.
        """
        chosen, chosen_load, is_any_able = None, 0, False
        for server in self.fleet.servers:
            if server.version is None or server.version < version:
                continue
            is_any_able = True
            load, size = server.load, server.window.size
            if server.version >= reserved_from or (chosen is not None and load >= chosen_load):
                continue
            least = min(places, max(1, size // _WORTH)) if server.abilities.gives_parts else 1
            if load + least <= size:
                chosen, chosen_load = server, load
        if chosen is None:
            if not is_any_able and not any(each.may_come_back for each in self.fleet.servers):
                raise RolloutError("no server is left:\n" + "\n".join(self.fleet.problems()))
            return None
        count = 1
        if chosen.abilities.gives_parts:
            room = chosen.window.size - chosen_load
            count = min(places, room, max(1, self._level - chosen_load))
        chosen.expected += count
        return chosen, count
