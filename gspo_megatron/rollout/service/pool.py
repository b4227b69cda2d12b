"""All servers of a run: who is sent what, who has which weights, and who is out.

A server serves only after it has proven the newest weights: its version, and greedy responses to
fixed prompts whose log-probs are the trainer's own. A server that dies, hangs or fails the proof
gets no more requests; those that it had go to others. One that we started is started again with the
newest weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
import numpy as np

from gspo_megatron.errors import RolloutError
from gspo_megatron.rollout.service.checks import Abilities, Needs, check_server
from gspo_megatron.rollout.service.client import (
    KEEP,
    RECOMPUTE,
    WAIT,
    Client,
    ModelFacts,
    Response,
    ServerGone,
    ServerRefused,
)
from gspo_megatron.rollout.service.flight import Flight, split, versions_of
from gspo_megatron.rollout.service.pacing import MOST_REQUESTS, Clock, Line, Window
from gspo_megatron.rollout.service.process import ServerProcess
from gspo_megatron.rollout.service.proof import describe_families, suspect_families
from gspo_megatron.rollout.service.remote import RemoteProcess

_LOOK_SECONDS = 1.0  # between two looks at a server
_CALL_SECONDS = 10.0  # for calls that need no work of the engine
_MOMENT = 0.3  # seconds: a process loses its connections before it has ended
_OUTLIERS = 8  # one response in so many may differ
_NOT_THE_WEIGHTS = "does not have the trainer's weights"

Process = ServerProcess | RemoteProcess


@dataclass(frozen=True)
class Probe:
    """What servers with the same weights as the trainer answer."""

    prompts: list[list[int]]  # token ids
    tokens: list[list[int]]  # of the greedy responses
    logprobs: list[list[float]]  # of these tokens, at temperature 1
    largest: float  # tolerance of a single log-prob
    mean: float  # tolerance of the mean absolute difference of a response's


@dataclass(frozen=True)
class Weights:
    """A version of the policy's weights on its way to the servers."""

    version: int  # steps that the policy has made
    folder: str | None  # Hugging Face folder; None: not written until a server asks for it
    probe: Probe | None = None  # None: the trainer still computes it
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
    """One server, as the service sees it."""

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
    proof_seconds: float = 0.0
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


class Pool:
    """The servers of a run."""

    def __init__(self, servers: Sequence[Server], settings: PoolSettings) -> None:
        self.servers, self.settings = list(servers), settings
        self.weights: Weights | None = None
        self.resubmitted = 0
        self.wants_folder = False  # a server starts again, and its weights are in no folder
        self.began = time.time()
        self._line: Line[Server] = Line()
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
        for server in self.servers:
            work = self._begin(server) if first else self._renew(server, weights)
            server.tending = asyncio.create_task(_after(server.tending, work))
        await asyncio.gather(*(server.tending for server in self.servers))
        left = [s for s in self.servers if s.version is not None and s.version >= weights.version]
        # At the start every server has to be sound: a run that begins with fewer was set up wrong.
        if not left or (first and len(left) < len(self.servers)):
            raise RolloutError("\n".join(self.problems()))

    async def update(self, weights: Weights) -> None:
        """`take` and `bring`."""
        self.take(weights)
        await self.bring()

    async def offer(self, **parts: Any) -> None:
        """More of the newest weights: their `folder`, their `probe`."""
        assert self.weights is not None, "weights that nobody has made"
        self.weights = replace(self.weights, **parts)
        self.wants_folder &= self.weights.folder is None
        await self._tell()

    async def _tell(self) -> None:
        """Something has changed. Whether a server may come back is known a moment later."""
        async with self._changed:
            self._changed.notify_all()
        asyncio.get_running_loop().call_soon(self._admit)

    async def _probe_of(self, version: int) -> Probe | None:
        """Of these weights; waits for it. None: there are newer ones by now."""
        async with self._changed:
            while True:
                assert self.weights is not None, "a server that never had weights"
                if self.weights.version != version or self.weights.probe is not None:
                    return self.weights.probe if self.weights.version == version else None
                await self._changed.wait()

    async def _newest_in_a_folder(self) -> Weights:
        """The newest weights; waits until they are in a folder."""
        async with self._changed:
            while True:
                assert self.weights is not None, "a server that never had weights"
                if self.weights.folder is not None:
                    return self.weights
                self.wants_folder = True
                self._changed.notify_all()
                await self._changed.wait()

    async def asks_for_folder(self) -> None:
        """Wait until a server needs the newest weights in a folder."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.wants_folder)

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
    async def _split(self, server: Server, version: int, seconds: float) -> AsyncIterator[None]:
        """While it is paused: responses under way have tokens of two versions from now on."""
        flights, counts = tuple(server.in_flight), {}
        if flights and server.abilities.counts_tokens:
            counts = await server.client.response_tokens(seconds=seconds) or {}
        elif server.tells_versions:
            counts = dict.fromkeys((each.name for each in flights), 0)  # the answer says them
        yield
        split(flights, counts, version)

    async def _prove(self, server: Server, weights: Weights, *, at_start: bool = False) -> bool:
        """Let the server serve if it has these weights. False: there are newer ones, and nobody
        knows any more. Raises RolloutError where it has not."""
        probe, seconds = await self._probe_of(weights.version), self.settings.update_seconds
        if probe is None:
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
            for prompt, tokens in zip(probe.prompts, probe.tokens, strict=True)
        )
        responses = await asyncio.gather(*calls)
        server.tells_versions = all(each.spans is not None for each in responses)
        problem = compare(probe, responses)
        if server.abilities.is_extended and (at_start or problem is not None):
            suspects = await self._suspects(server, weights.folder)
            if suspects:
                problem = f"{problem or _NOT_THE_WEIGHTS}; not as in the folder: {suspects}"
            elif problem is not None:
                problem += (
                    "; its tensors have the folder's sums, so suspect are the kernels' own copies "
                    "of them, its prefix cache and the folder"
                )
        if problem is not None:
            raise RolloutError(problem)
        server.version = server.proven = weights.version
        server.why_out, server.heard = None, time.monotonic()
        server.proof_seconds = server.heard - start
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
            if (why := await server.client.why_not_healthy(seconds=_CALL_SECONDS)) is None:
                return
            ended = server.process and server.process.has_ended()
            if ended:
                raise ServerGone(ended)
            if time.monotonic() > deadline:
                where = "" if server.process is None else f": {server.process.last_lines()}"
                raise ServerGone(f"not ready within {self.settings.update_seconds:g} s{where}")
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
        routes = self.settings.needs.with_routes and sampling["temperature"] > 0
        while True:
            server = await self._turn(draw, version)
            if server.version is None or server.version < version:
                continue  # it has ceased to serve in between
            flight = Flight(server.version)
            call = flight.call = asyncio.create_task(
                server.client.generate(
                    prompt,
                    sampling,
                    self.settings.facts,
                    seconds=1e9,
                    routes=routes,
                    name=flight.name,
                    salt=self._salt(server.version),
                )
            )
            self._depart(server, flight)
            try:
                await asyncio.wait([call])
                if not call.cancelled():  # by `_put_out`, or because it is taken back
                    server.heard, response = time.monotonic(), call.result()
                    if await self._has_proven(server, flight.version):
                        return replace(response, versions=_versions(response, flight))
            except ServerRefused as error:
                raise RolloutError(f"{server.name} refuses a request: {error}") from error
            except ServerGone as error:
                await self._lose(server, str(error))
            finally:
                call.cancel()
                self._arrive(server, flight)
            self.resubmitted += not flight.is_taken_back

    def _salt(self, version: int) -> str | None:
        """What a server remembers of prompts is forgotten with each version, unless responses
        under way hold on to it: then prompts of the next version are told apart."""
        return str(version) if self.settings.keeps_kv else None

    async def _has_proven(self, server: Server, version: int) -> bool:
        """Whether it proves these weights, or later ones; waits for that."""
        async with self._changed:
            await self._changed.wait_for(
                lambda: server.proven >= version or server.why_out is not None
            )
        return server.proven >= version

    async def _turn(self, draw: str, version: int) -> Server:
        """Wait in the line; the server that the request is to go to."""
        turn = self._line.join(draw, version)
        self._admit()
        try:
            return await turn
        finally:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                turn.result().expected -= 1  # it is sent without a pause now, or never

    def _admit(self) -> None:
        """Send what has room somewhere."""
        self._line.admit(self._choose)

    def _choose(self, version: int) -> Server | None:
        """The server with the fewest requests of those with room; None: wait for one."""
        able = [s for s in self.servers if s.version is not None and s.version >= version]
        if not able and not any(self._may_come_back(s) for s in self.servers):
            raise RolloutError("no server is left:\n" + "\n".join(self.problems()))
        free = [each for each in able if each.load < each.window.size]
        chosen = min(free, key=lambda each: each.load, default=None)
        if chosen is not None:
            chosen.expected += 1
        return chosen

    def _most(self, server: Server) -> int:
        """How many requests may be on their way to it. Where new weights come in between, none
        waits there for its turn, and the proof of the weights finds a place."""
        if not self.settings.max_staleness or not server.abilities.sequences:
            return MOST_REQUESTS
        return min(MOST_REQUESTS, max(1, server.abilities.sequences - 1))

    @staticmethod
    def _depart(server: Server, flight: Flight) -> None:
        server.in_flight.add(flight)
        server.busy.begin()
        server.working.begin()

    def _arrive(self, server: Server, flight: Flight) -> None:
        server.in_flight.discard(flight)
        server.busy.end()
        server.working.end()
        self._admit()

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
        for flight in tuple(server.in_flight):
            assert flight.call is not None
            flight.call.cancel()
        await asyncio.sleep(_MOMENT)
        server.why_out = (server.process and server.process.has_ended()) or why
        if server.process is not None:
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
            await asyncio.gather(*(self._look(each) for each in self.servers if each.serves))
            self._admit()

    async def _look(self, server: Server) -> None:
        ended = server.process and server.process.has_ended()
        if ended:
            await self._lose(server, ended)
            return
        with contextlib.suppress(ServerGone, ServerRefused):
            found = await server.client.figures(seconds=_CALL_SECONDS)
            tokens = found.get("generation_tokens_total", 0.0)
            if tokens != server.tokens or not found.get("num_requests_running", 0.0):
                server.heard = time.monotonic()
            server.tokens, server.kv_usage = tokens, found.get("kv_cache_usage_perc", 0.0)
            server.window.look(found, server.load)
        silent = time.monotonic() - server.heard
        if silent > self.settings.silence_seconds:
            await self._lose(server, f"has not answered or drawn a token for {silent:.0f} s")


def _versions(response: Response, flight: Flight) -> np.ndarray:
    """[tokens] int32: of the weights that drew them, from the server where it tells them."""
    count = len(response.token_ids)
    if response.spans is None:
        return flight.versions(count)
    # a server that has had no update has a word of its own for the weights that it started with
    spans = [(int(n) if n.isdecimal() else flight.first_version, end) for n, end in response.spans]
    return versions_of(spans, count)


async def _after(before: asyncio.Task[None] | None, then: Coroutine[Any, Any, None]) -> None:
    if before is not None:
        await asyncio.wait([before])
    await then


def compare(probe: Probe, responses: Sequence[Response]) -> str | None:
    """How greedy responses differ from the trainer's, in words; None where they do not.

    Greedy decoding takes the likeliest token, so the log-probs agree up to the first token that
    differs, and there too: two tokens that are as likely as each other may be told apart by
    rounding. So may two experts, which moves the log-probs of one response; wrong weights move
    nearly all of them, and an old prefix cache those of all long prompts. So one in eight may
    differ.
    """
    differences = []
    for tokens, logprobs, response in zip(probe.tokens, probe.logprobs, responses, strict=True):
        same = np.array(tokens) == response.token_ids
        end = len(same) if same.all() else int(same.argmin()) + 1
        differences.append(np.abs(np.array(logprobs) - response.logprobs)[:end])
    largest = max(each.max() for each in differences)
    wrong = sum(each.mean() > probe.mean for each in differences)
    allowed = len(differences) // _OUTLIERS
    if wrong <= allowed and largest <= probe.largest:
        return None
    return (
        f"{_NOT_THE_WEIGHTS}: log-probs of {wrong} of {len(differences)} responses differ by more "
        f"than {probe.mean:g} on average, the largest by {largest:.2g}; legal: {allowed}, and "
        f"{probe.largest:g}"
    )


def connected_session() -> aiohttp.ClientSession:
    """For the clients of all servers; without a limit of its own on connections. A request has a
    connection of its own: vLLM closes one that was idle for 5 s, and a request that is sent at this
    moment is lost as if the server had died."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True))
