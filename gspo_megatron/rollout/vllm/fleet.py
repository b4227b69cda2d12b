"""Starts, watches and restarts all servers of a run.

A server that dies, hangs or fails the check of its weights gets no more requests. Its current
requests go to other servers (`scheduler`). A server that this run started is restarted with the
newest weights. Any other server is tried again after a while, and gets the newest weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Coroutine, Sequence
from typing import Any

from gspo_megatron.errors import RolloutError, printable, tell
from gspo_megatron.rollout.vllm.adapters import AdapterLoader
from gspo_megatron.rollout.vllm.checks import check_server
from gspo_megatron.rollout.vllm.client import OutOfFilesError, ServerGone, ServerRefused
from gspo_megatron.rollout.vllm.server import MOST_REQUESTS, FleetSettings, RequestWindow, Server
from gspo_megatron.rollout.vllm.weights import (
    CALL_SECONDS,
    MOMENT,
    WeightChanges,
    WeightLoader,
    Weights,
    was_blocked,
)

_LOOK_SECONDS = 1.0  # time between two checks of a server's health
# A server that this run has not started is tried again after this time; each further time is five
# times as long, up to _LONGEST_PAUSE.
_FIRST_PAUSE, _LONGEST_PAUSE = 2.0, 300.0


class Fleet:
    """The servers of a run."""

    def __init__(self, servers: Sequence[Server], settings: FleetSettings) -> None:
        self.servers, self.settings = list(servers), settings
        self.changes = WeightChanges()  # announced when a server begins or stops serving
        loader = WeightLoader if settings.base is None else AdapterLoader
        self.loader = loader(settings, self.changes)
        self.began = time.time()
        self._watcher: asyncio.Task[None] | None = None

    async def close(self) -> None:
        """End the servers that this run started."""
        if self._watcher is not None:
            self._watcher.cancel()
        for server in self.servers:
            if server.bringing is not None:
                server.bringing.cancel()
        ours = [server.process for server in self.servers if server.process is not None]
        await asyncio.gather(*(process.end() for process in ours))

    def problems(self) -> list[str]:
        """Return why servers are out of service, one line for each of them."""
        return [f"{each.name}: {each.why_out}" for each in self.servers if each.why_out]

    def take_settings(self, settings: FleetSettings) -> None:
        """Use other settings from now on. The servers must fit them, and no request may be in
        progress."""
        self.settings = self.loader.settings = settings
        for server in self.servers:
            server.window = RequestWindow(self._most_requests(server))

    # New weights

    def take_weights(self, weights: Weights) -> dict[str, int]:
        """Make these weights the newest weights.

        Returns the servers to which rank 0 must stream the weights: key of a server -> number of
        workers.
        """
        self.loader.take_weights(weights)
        for number, server in enumerate(self.servers):
            if weights.stream is not None and server.serves and server.can_stream:
                server.stream_key = f"{os.getpid()}/{number}/{server.restarts}"
        return {s.stream_key: s.abilities.workers for s in self.servers if s.stream_key}

    async def update_servers(self) -> None:
        """Load the newest weights on all servers; the first call starts them.

        Raises RolloutError if no server is left, or if any server fails at the start.
        """
        weights, first = self.loader.newest, self._watcher is None
        await self.changes.announce()
        if first:
            self._watcher = asyncio.create_task(self._watch())
        for server in self.servers:
            work = self._start(server) if first else self._renew(server, weights)
            server.bringing = asyncio.create_task(_after(server.bringing, work))
        await asyncio.gather(*(each.bringing for each in self.servers if each.bringing))
        up_to_date = [
            server
            for server in self.servers
            if server.version is not None and server.version >= weights.version
        ]
        # A server that fails at the start means a wrong setup, so all servers must work.
        if not up_to_date or (first and len(up_to_date) < len(self.servers)):
            raise RolloutError("\n".join(self.problems()))

    async def _renew(self, server: Server, weights: Weights) -> None:
        """Load new weights on a running server, unless a restart has already loaded them."""
        if server.why_out is not None or server.version == weights.version:
            return
        server.working.begin()
        try:
            # The server may be lost before or while it gets the weights. `bringing` is then its
            # restart.
            is_lost = not server.serves or not await self.loader.renew(server, weights)
            if is_lost and server.bringing is not None:
                await asyncio.wait([server.bringing])
            elif server.start is None:
                server.failures = 0  # only failures without an update between them count
        except OutOfFilesError:
            raise
        except (ServerGone, ServerRefused, RolloutError) as error:
            await self._replace(server, f"weights of version {weights.version}: {error}")
        finally:
            server.working.end()

    # Start and restart

    async def _start(self, server: Server) -> None:
        """Start a server, or connect to a running one, and check or load its first weights."""
        weights = await self.loader.newest_in_folder()
        folder = self.settings.base or str(weights.folder)
        deadline = time.monotonic() + self.settings.update_seconds
        try:
            if server.start is not None:
                server.process = None  # how the process before ended is no longer the reason
                server.process = server.start(folder)
            await self._wait_until_ready(server, deadline)
            # The request may take all the time that is left, because vLLM may examine the machine
            # before it answers.
            remaining = max(deadline - time.monotonic(), 0.1)
            server.abilities = await check_server(
                server.client, self.settings.needs, folder, seconds=remaining
            )
            server.window = RequestWindow(self._most_requests(server))
            await self.loader.first_weights(server, weights, deadline)
        except OutOfFilesError:
            raise
        except (ServerGone, ServerRefused, RolloutError) as error:
            await self._put_out(server, str(error))

    async def _wait_until_ready(self, server: Server, deadline: float) -> None:
        while True:
            if server.process is not None:
                # If the server is on another node, its URL is known only now.
                server.client.url = server.process.url
            why = await server.client.why_not_ready(seconds=CALL_SECONDS)
            if why is None:
                return
            ended = server.process and server.process.has_ended()
            if ended:
                raise ServerGone(ended)
            if time.monotonic() > deadline:
                raise ServerGone(f"not ready within {self.settings.update_seconds:g} s")
            if server.process is None:
                raise ServerGone(f"cannot be reached: {why}")
            await asyncio.sleep(0.2)

    def _most_requests(self, server: Server) -> int:
        """Return the limit of requests in flight to a server.

        If new weights may arrive while responses are generated, no request may wait inside the
        server, and one place stays free for the check of the weights.
        """
        abilities = server.abilities
        most, places = MOST_REQUESTS * abilities.engines, abilities.sequences * abilities.engines
        if not self.settings.max_staleness or not places:
            return most
        return min(most, max(1, places - 1))

    def lose_server(self, server: Server, why: str) -> None:
        """Put a server that does not answer any more out of service, and restart it."""
        if server.serves:
            server.version = None
            # `bringing` is set at once, so that the lost requests know that the server may come
            # back.
            server.bringing = asyncio.create_task(self._replace(server, why))

    async def _replace(self, server: Server, why: str) -> None:
        await self._put_out(server, why)
        await self._restart(server)

    async def _put_out(self, server: Server, why: str) -> None:
        """Stop sending requests to a server, cancel its requests and kill its process."""
        server.version = server.stream_key = None
        server.cancel_requests()
        await asyncio.sleep(MOMENT)
        server.why_out = why
        if server.process is not None:
            # This text contains the last errors of the server's log.
            how_it_ended = server.process.has_ended()
            server.why_out = how_it_ended or f"{why}{server.process.errors()}"
            await asyncio.to_thread(server.process.kill)
        await self.changes.announce()

    async def _restart(self, server: Server) -> None:
        """Restart a server that this run started, or try another server again, until it has the
        newest weights and works, or until no restart is left."""
        while server.failures < self.settings.restarts:
            pause = min(_FIRST_PAUSE * 5 ** min(server.failures, 9), _LONGEST_PAUSE)
            server.restarts += 1
            server.failures += 1
            what = f"restart {server.restarts}" if server.start else f"tried again in {pause:g} s"
            tell(printable(f"{server.name}: {server.why_out}; {what}"), sys.stdout)
            if server.start is None:
                await asyncio.sleep(pause)
            await self._start(server)
            if server.serves:
                return
        tell(printable(f"{server.name} is out: {server.why_out}"), sys.stdout)
        await self.changes.announce()

    # Health

    async def _watch(self) -> None:
        """Check all servers regularly for an ended process and for silence."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            # The requests for responses report this error.
            with contextlib.suppress(OutOfFilesError):
                await asyncio.gather(*(self._look_at(s) for s in self.servers if s.serves))
            await self.changes.announce()

    async def _look_at(self, server: Server) -> None:
        ended = None if server.process is None else server.process.has_ended()
        if ended:
            self.lose_server(server, ended)
            return
        asked = time.monotonic()
        with contextlib.suppress(ServerGone, ServerRefused):
            figures = await server.client.figures(
                seconds=CALL_SECONDS, in_short=server.abilities.gives_parts
            )
            tokens = figures.get("generation_tokens_total", 0.0)
            # vLLM's own number of running requests is old if its engine hangs
            if tokens != server.tokens or not server.in_flight:
                server.heard = time.monotonic()
            server.tokens, server.kv_usage = tokens, figures.get("kv_cache_usage_perc", 0.0)
            server.window.adjust(figures, server.load)
            await self.loader.release(server)
        silent = time.monotonic() - server.heard
        if silent > self.settings.silence_seconds and not was_blocked(asked):
            self.lose_server(server, f"has not answered or drawn a token for {silent:.0f} s")


async def _after(before: asyncio.Task[None] | None, then: Coroutine[Any, Any, None]) -> None:
    if before is not None:
        try:
            await asyncio.wait([before])
        except asyncio.CancelledError:
            before.cancel()
            then.close()
            raise
    await then
