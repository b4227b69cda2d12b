"""All servers of a run: who is sent what, who has which weights, and who is out.

A server serves only after it has proven the newest weights: its version, and greedy responses to
fixed prompts whose log-probs are the trainer's own. A server that dies, hangs or fails the proof
gets no more requests; those that it had go to others. One that we started is started again with the
newest weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import time
from collections.abc import AsyncGenerator, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from gspo_megatron.errors import RolloutError
from gspo_megatron.rollout.vllm.checks import check_server
from gspo_megatron.rollout.vllm.client import (
    KEEP,
    RECOMPUTE,
    WAIT,
    NoAnswer,
    OutOfFilesError,
    ServerGone,
    ServerRefused,
)
from gspo_megatron.rollout.vllm.flight import split
from gspo_megatron.rollout.vllm.pacing import MOST_REQUESTS, Line, Window
from gspo_megatron.rollout.vllm.parts import Part, Seed, Wanted
from gspo_megatron.rollout.vllm.server import PoolSettings, Server, Weights
from gspo_megatron.rollout.vllm.weight_check import (
    NOT_THE_WEIGHTS,
    WeightCheck,
    describe_families,
    suspect_families,
)
from gspo_megatron.rollout.vllm.worker.gspo_vllm_answers import Response

_LOOK_SECONDS = 1.0  # between two looks at a server
_CALL_SECONDS = 10.0  # for calls that need no work of the engine
_MOMENT = 0.3  # seconds: a process loses its connections before it has ended
_WORTH = 16  # a request is worth its price for a sixteenth of a server's places

_T = TypeVar("_T")


class Pool:
    """The servers of a run."""

    def __init__(self, servers: Sequence[Server], settings: PoolSettings) -> None:
        self.servers, self.settings = list(servers), settings
        self.weights: Weights | None = None
        self.resubmitted = 0
        self.needs_folder = False  # a server starts again, and its weights are in no folder
        self.began = time.time()
        self._line: Line[Server] = Line()
        self._admits_soon = False
        self._level = 0  # responses of each server, once all that wait have gone
        self._changed = asyncio.Condition()  # a server has begun or ceased to serve
        self._watcher: asyncio.Task[None] | None = None

    async def close(self) -> None:
        """End the servers that we started."""
        if self._watcher is not None:
            self._watcher.cancel()
        for server in self.servers:
            if server.tending is not None:
                server.tending.cancel()
        ours = [server.process for server in self.servers if server.process is not None]
        await asyncio.gather(*(process.end() for process in ours))

    # Weights

    def take(self, weights: Weights) -> dict[str, int]:
        """Make these the newest weights. Returns to whom rank 0 has to send them, where it sends
        them: key of a server -> number of its workers."""
        self.weights = weights
        for number, server in enumerate(self.servers):
            if weights.stream is not None and server.serves and server.can_stream:
                server.receives = f"{os.getpid()}/{number}/{server.restarts}"
        return {each.receives: each.abilities.workers for each in self.servers if each.receives}

    async def bring(self) -> None:
        """Bring all servers to the newest weights; the first time, start them. Raises RolloutError
        where no server is left, or where one is at fault that the user has to mend."""
        weights, first = self.weights, self._watcher is None
        assert weights is not None, "weights that nobody has made"
        await self._tell()
        if first:
            self._watcher = asyncio.create_task(self._watch())
        begun: list[asyncio.Task[None]] = []
        for server in self.servers:
            work = self._begin(server) if first else self._renew(server, weights)
            server.tending = asyncio.create_task(_after(server.tending, work))
            begun.append(server.tending)
        await asyncio.gather(*begun)
        left = [s for s in self.servers if s.version is not None and s.version >= weights.version]
        # At the start every server has to be sound: a run that begins with fewer was set up wrong.
        if not left or (first and len(left) < len(self.servers)):
            raise RolloutError("\n".join(self.problems()))

    async def update(self, weights: Weights) -> None:
        """`take` and `bring`."""
        self.take(weights)
        await self.bring()

    async def offer(self, **parts: Any) -> None:
        """More of the newest weights: their `folder`, their `check`."""
        assert self.weights is not None, "weights that nobody has made"
        self.weights = replace(self.weights, **parts)
        self.needs_folder &= self.weights.folder is None
        await self._tell()

    async def _tell(self) -> None:
        """Something has changed. Whether a server may come back is known a moment later."""
        async with self._changed:
            self._changed.notify_all()
        self._admit_soon()

    async def _check_of(self, version: int) -> WeightCheck | None:
        """Of these weights; waits for it. None: there are newer ones by now."""
        async with self._changed:
            while True:
                assert self.weights is not None, "a server that never had weights"
                if self.weights.version != version or self.weights.check is not None:
                    return self.weights.check if self.weights.version == version else None
                await self._changed.wait()

    async def _newest_in_a_folder(self) -> Weights:
        """The newest weights; waits until they are in a folder."""
        async with self._changed:
            while True:
                assert self.weights is not None, "a server that never had weights"
                if self.weights.folder is not None:
                    return self.weights
                self.needs_folder = True
                self._changed.notify_all()
                await self._changed.wait()

    async def asks_for_folder(self) -> None:
        """Wait until a server needs the newest weights in a folder."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.needs_folder)

    def problems(self) -> list[str]:
        """Why servers are out."""
        return [f"{each.name}: {each.why_out}" for each in self.servers if each.why_out]

    async def _begin(self, server: Server) -> None:
        """The first weights of a server: those it is started with, or loaded into a running one."""
        weights = await self._newest_in_a_folder()
        deadline = time.monotonic() + self.settings.update_seconds
        try:
            if server.start is not None:
                server.process = server.start(str(weights.folder))
            await self._wait_until_healthy(server, deadline)
            left = max(deadline - time.monotonic(), 0.1)  # vLLM looks at the whole machine for it
            server.abilities = await check_server(
                server.client, self.settings.needs, str(weights.folder), seconds=left
            )
            server.window = Window(self._most(server))
            if server.start is None:
                await self._load(server, weights, deadline)
            while not await self._prove(server, weights, at_start=True):
                weights = await self._newest_in_a_folder()
                await self._load(server, weights, time.monotonic() + self.settings.update_seconds)
        except OutOfFilesError:
            raise
        except (ServerGone, ServerRefused, RolloutError) as error:
            await self._put_out(server, str(error))

    async def _renew(self, server: Server, weights: Weights) -> None:
        """New weights for a server that serves, if it has not got them by a restart."""
        if server.why_out is not None or server.version == weights.version:
            return
        server.working.begin()
        try:
            if not (server.receives and await self._receive(server, weights)):
                weights = await self._newest_in_a_folder()
                await self._load(server, weights, time.monotonic() + self.settings.update_seconds)
            await self._prove(server, weights)
        except OutOfFilesError:
            raise
        except (ServerGone, ServerRefused, RolloutError) as error:
            await self._put_out(server, f"weights of version {weights.version}: {error}")
            await self._restart(server)
        finally:
            server.working.end()

    async def _receive(self, server: Server, weights: Weights) -> bool:
        """Let rank 0 send it the weights. Where that fails, a folder may do, and it gets no others
        from then on."""
        group = {"key": server.receives, "world_size": server.abilities.workers + 1}
        deadline = time.monotonic() + self.settings.update_seconds
        try:
            await self._load(server, weights, deadline, {"plan": weights.stream, **group})
        except (ServerGone, ServerRefused) as error:
            await asyncio.sleep(_MOMENT)
            if server.process and server.process.has_ended():
                raise
            server.wants_folders = True
            print(f"{server.name}: cannot take weights from rank 0, but in folders: {error}")
            return False
        finally:
            server.receives = None
        return True

    async def _load(
        self,
        server: Server,
        weights: Weights,
        deadline: float,
        stream: Mapping[str, Any] | None = None,
    ) -> None:
        server.version, start = None, time.monotonic()  # nothing is sent to it meanwhile
        seconds = max(deadline - start, 0.1)
        await server.client.load_weights(
            weights.folder,
            str(weights.version),
            seconds=seconds,
            forgets_prepacked=server.abilities.is_extended,
            stream=stream,
            pause=self._pause(server),
            paused=self._split(server, weights.version, seconds),
        )
        server.load_seconds = time.monotonic() - start

    def _pause(self, server: Server) -> Mapping[str, str]:
        """How to pause it. Responses under way go on only where it is known afterwards which
        weights drew which of their tokens."""
        if not server.in_flight:
            return RECOMPUTE  # there is nothing to keep
        if not (server.abilities.counts_tokens or server.tells_versions):
            return WAIT
        return KEEP if self.settings.keeps_kv else RECOMPUTE

    @contextlib.asynccontextmanager
    async def _split(self, server: Server, version: int, seconds: float) -> AsyncGenerator[None]:
        """While it is paused: responses under way have tokens of two versions from now on."""
        flights, counts = tuple(server.in_flight), {}
        if flights and server.abilities.counts_tokens:
            counts = await server.client.response_tokens(seconds=seconds) or {}
        elif server.tells_versions:
            counts = dict.fromkeys((each.name for each in flights), 0)  # the answer says them
        yield
        unknown = [f.name for f in flights if f.response is None and f.name not in counts]
        ended: set[str] = set()
        if unknown and server.abilities.gives_parts:
            # else: no answer says which of them have ended, and all of them are taken back
            with contextlib.suppress(ServerGone, ServerRefused):
                ended = await server.client.take_back(unknown, seconds=seconds)
        split(flights, counts, version, ended)

    async def _prove(self, server: Server, weights: Weights, *, at_start: bool = False) -> bool:
        """Let the server serve if it has these weights. False: there are newer ones, and nobody
        knows any more. Raises RolloutError where it has not."""
        check, seconds = await self._check_of(weights.version), self.settings.update_seconds
        if check is None:
            return False
        start = time.monotonic()
        if not at_start or server.start is None:
            told = await server.client.weight_version(seconds=_CALL_SECONDS)
            if told != str(weights.version):
                raise RolloutError(f"says that it has weights {told}, not {weights.version}")
        facts, routes = self.settings.facts, self.settings.needs.with_routes
        calls = (
            server.client.generate(
                prompt,
                {"temperature": 0.0, "max_tokens": len(tokens), "ignore_eos": True},
                facts,
                seconds=seconds,
                routes=routes,
                salt=self._salt(weights.version),
            )
            for prompt, tokens in zip(check.prompts, check.tokens, strict=True)
        )
        responses = await asyncio.gather(*calls)
        server.tells_versions = all(each.spans is not None for each in responses)
        problem = check.difference(responses)
        if server.abilities.is_extended and (at_start or problem is not None):
            suspects = await self._suspects(server, weights.folder)
            if suspects:
                problem = f"{problem or NOT_THE_WEIGHTS}; not as in the folder: {suspects}"
            elif problem is not None:
                problem += (
                    "; its tensors have the folder's sums, so suspect are the kernels' own copies "
                    "of them, its prefix cache and the folder"
                )
        if problem is not None:
            raise RolloutError(problem)
        server.version = server.proven = weights.version
        server.why_out, server.heard = None, time.monotonic()
        server.check_seconds = server.heard - start
        await self._tell()
        return True

    async def _suspects(self, server: Server, folder: str | None) -> str:
        """The families of tensors that the server has otherwise than this folder, or the newest."""
        folder = folder or (await self._newest_in_a_folder()).folder
        seconds = self.settings.update_seconds
        found = await server.client.weight_sums(None, seconds=seconds)
        expected, *_ = await server.client.weight_sums(folder, seconds=seconds)
        return describe_families(suspect_families(found, expected), len(expected))

    async def _wait_until_healthy(self, server: Server, deadline: float) -> None:
        while True:
            if server.process is not None:
                server.client.url = server.process.url  # on another node it is known later
            why = await server.client.why_not_healthy(seconds=_CALL_SECONDS)
            if why is None and server.start is not None:
                try:
                    if wrong := await server.client.why_not_proven(seconds=_CALL_SECONDS):
                        raise ServerGone(wrong)
                except NoAnswer as error:
                    why = str(error)  # which is no wrong proof: it is asked again
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

    # Requests

    async def generate(
        self, prompt: Sequence[int], sampling: Mapping[str, Any], version: int, draw: str = ""
    ) -> Response:
        """A response drawn with the weights of `version` or later ones, which may become newer
        while it is drawn, from whichever server has the fewest requests. Those of a draw whose name
        sorts before others are sent first. Raises RolloutError where no server is left, or where
        all refuse the request."""
        [response] = await self.generate_all(prompt, sampling, [None], version, draw)
        return response

    async def generate_all(
        self,
        prompt: Sequence[int],
        sampling: Mapping[str, Any],
        seeds: Sequence[Seed],
        version: int,
        draw: str = "",
    ) -> list[Response]:
        """The same, a response for each of the seeds."""
        settings = self.settings
        routes = settings.needs.with_routes and sampling["temperature"] > 0
        wanted = Wanted(prompt, sampling, version, draw, routes, settings.facts)
        return await self._drawn(wanted, seeds)

    async def _drawn(
        self, wanted: Wanted, seeds: Sequence[Seed], *, first: bool = False
    ) -> list[Response]:
        """Sent as places are found, in parts. first: before others of its draw."""
        parts: list[Part] = []
        rest = seeds
        try:
            for server, places in await self._turn(wanted, len(seeds), first=first):
                parts.append(self._send(server, wanted, rest[:places]))
                rest = rest[places:]
            works = [self._whole(part) for part in parts]
            if rest:
                works.append(self._drawn(wanted, rest, first=True))
            return list(itertools.chain(*await all_of(works)))
        finally:
            for part in parts:
                part.leave()

    def _send(self, server: Server, wanted: Wanted, seeds: Sequence[Seed]) -> Part:
        def draw_again(seed: Seed) -> asyncio.Task[list[Response]]:
            return asyncio.create_task(self._drawn(wanted, [seed], first=True))

        assert server.version is not None, "_turn gives servers that serve"
        wanted_here = replace(wanted, salt=self._salt(server.version))
        return Part(server, wanted_here, seeds, draw_again, self._admit_soon)

    async def _whole(self, part: Part) -> list[Response]:
        """All responses of a part. Those that its server does not give are drawn again."""
        server = part.server
        await asyncio.wait([part.call])
        try:
            if not part.call.cancelled():  # by `_put_out`, or because all are taken back
                part.call.result()
        except ServerRefused as error:
            raise RolloutError(f"{server.name} refuses a request: {error}") from error
        except ServerGone as error:
            await self._lose(server, str(error))
        part.land()
        await self._has_proven(server, part.newest())
        missing, found = part.missing(), {}
        self.resubmitted += len(missing)
        if missing:
            again = await self._drawn(part.wanted, [part.seeds[n] for n in missing], first=True)
            found = dict(zip(missing, again, strict=True))
        for number, task in part.again.items():
            [found[number]] = await task
        flights = enumerate(part.flights)
        arrived = {n: each.response for n, each in flights if each.response is not None}
        responses = arrived | found
        return [responses[n] for n in range(len(part.flights))]

    def _salt(self, version: int) -> str | None:
        """What a server remembers of prompts is forgotten with each version, unless responses
        under way hold on to it: then prompts of the next version are told apart."""
        return str(version) if self.settings.keeps_kv else None

    async def _has_proven(self, server: Server, version: int) -> None:
        """Wait until it has proven these weights, or later ones, or is out."""
        if server.proven < version:
            async with self._changed:
                await self._changed.wait_for(
                    lambda: server.proven >= version or server.why_out is not None
                )

    async def _turn(self, wanted: Wanted, places: int, *, first: bool) -> list[tuple[Server, int]]:
        """Wait in the line; which servers have room for how many of the responses. All of them
        serve now: to be used at once."""
        while True:
            turn = self._line.join(wanted.draw, wanted.version, places, first=first)
            self._admit_soon()
            try:
                granted = await turn.granted
            finally:
                self._line.leave(turn)
                is_granted = turn.granted.done() and not turn.granted.cancelled()
                if is_granted and turn.granted.exception() is None:
                    for server, count in turn.granted.result():
                        server.expected -= count  # it is sent without a pause now, or never
            serving = [
                (server, count)
                for server, count in granted
                # it may have ceased to serve in between
                if server.version is not None and server.version >= wanted.version
            ]
            if serving:
                return serving

    def _admit_soon(self) -> None:
        """Once for all that happens in this turn of the event loop."""
        if self._line.places and not self._admits_soon:
            self._admits_soon = True
            asyncio.get_running_loop().call_soon(self._admit)

    def _admit(self) -> None:
        """Send what has room somewhere."""
        self._admits_soon = False
        if self._line.places:
            serving = [each for each in self.servers if each.version is not None]
            loads = sum(each.load for each in serving) + self._line.places
            self._level = -(-loads // max(1, len(serving)))
            self._line.admit(self._choose)

    def _choose(self, version: int, kept: float, wanted: int) -> tuple[Server, int] | None:
        """The server with the fewest requests of those with room, and for how many of the responses
        that are wanted; None: wait. A server takes its share of all that waits, and a part as a
        whole or as large as to be worth a request. Servers of the version `kept` are left alone."""
        chosen, chosen_load, is_any_able = None, 0, False
        for server in self.servers:
            if server.version is None or server.version < version:
                continue
            is_any_able = True
            load, size = server.load, server.window.size
            if server.version >= kept or (chosen is not None and load >= chosen_load):
                continue
            few = min(wanted, max(1, size // _WORTH)) if server.abilities.gives_parts else 1
            if load + few <= size:
                chosen, chosen_load = server, load
        if chosen is None:
            if not is_any_able and not any(self._may_come_back(each) for each in self.servers):
                raise RolloutError("no server is left:\n" + "\n".join(self.problems()))
            return None
        places = 1
        if chosen.abilities.gives_parts:
            room = chosen.window.size - chosen_load
            places = min(wanted, room, max(1, self._level - chosen_load))
        chosen.expected += places
        return chosen, places

    def _most(self, server: Server) -> int:
        """How many requests may be on their way to it. Where new weights come in between, none
        waits there for its turn, and the proof of the weights finds a place."""
        if not self.settings.max_staleness or not server.abilities.sequences:
            return MOST_REQUESTS
        return min(MOST_REQUESTS, max(1, server.abilities.sequences - 1))

    @staticmethod
    def _may_come_back(server: Server) -> bool:
        return server.tending is not None and not server.tending.done()

    # Servers that die

    async def _lose(self, server: Server, why: str) -> None:
        """A server that served is away."""
        if server.serves:
            server.version = None
            # at once: the requests that it had look for a server that may come back
            server.tending = asyncio.create_task(self._replace(server, why))

    async def _replace(self, server: Server, why: str) -> None:
        await self._put_out(server, why)
        await self._restart(server)

    async def _put_out(self, server: Server, why: str) -> None:
        """Send it nothing any more, and what it had to others."""
        server.version = server.receives = None
        for call in {flight.call for flight in server.in_flight}:
            assert call is not None
            call.cancel()
        await asyncio.sleep(_MOMENT)
        server.why_out = why
        if server.process is not None:
            told = server.process.has_ended()  # with the last errors of its log
            server.why_out = told or f"{why}{server.process.errors()}"
            await asyncio.to_thread(server.process.kill)
        await self._tell()

    async def _restart(self, server: Server) -> None:
        """Start one of ours again, while it has restarts left, with the newest weights."""
        while server.start is not None and server.restarts < self.settings.restarts:
            server.restarts += 1
            print(f"{server.name}: {server.why_out}; restart {server.restarts}", flush=True)
            await self._begin(server)
            if server.serves:
                return
        print(f"{server.name} is out: {server.why_out}", flush=True)
        await self._tell()

    async def _watch(self) -> None:
        """Look at every server again and again: a process that has ended, and silence."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            with contextlib.suppress(OutOfFilesError):  # the requests of draws tell it
                await asyncio.gather(*(self._look(each) for each in self.servers if each.serves))
            self._admit_soon()

    async def _look(self, server: Server) -> None:
        ended = None if server.process is None else server.process.has_ended()
        if ended:
            await self._lose(server, ended)
            return
        with contextlib.suppress(ServerGone, ServerRefused):
            found = await server.client.figures(
                seconds=_CALL_SECONDS, in_short=server.abilities.gives_parts
            )
            tokens = found.get("generation_tokens_total", 0.0)
            if tokens != server.tokens or not found.get("num_requests_running", 0.0):
                server.heard = time.monotonic()
            server.tokens, server.kv_usage = tokens, found.get("kv_cache_usage_perc", 0.0)
            server.window.look(found, server.load)
        silent = time.monotonic() - server.heard
        if silent > self.settings.silence_seconds:
            await self._lose(server, f"has not answered or drawn a token for {silent:.0f} s")


async def _after(before: asyncio.Task[None] | None, then: Coroutine[Any, Any, None]) -> None:
    if before is not None:
        await asyncio.wait([before])
    await then


async def all_of(works: Iterable[Coroutine[Any, Any, _T]]) -> list[_T]:
    """Their results. Where one fails, or this is cancelled, the others are cancelled."""
    works = list(works)
    if len(works) == 1:
        return [await works[0]]
    tasks = [asyncio.create_task(work) for work in works]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
