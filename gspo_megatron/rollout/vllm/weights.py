"""Loads a weights version on a server, and checks that the server has it.

A server gets requests only after it has passed the check of the newest weights: it reports their
version, and answers fixed prompts with the trainer's log-probs. `weight_sync` runs on the ranks.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from gspo_megatron.errors import RolloutError, printable
from gspo_megatron.process.coroutines import run_together
from gspo_megatron.rollout.vllm.client import KEEP, RECOMPUTE, WAIT, ServerGone, ServerRefused
from gspo_megatron.rollout.vllm.in_flight import split_at_update
from gspo_megatron.rollout.vllm.server import FleetSettings, Server
from gspo_megatron.rollout.vllm.weight_check import (
    NOT_THE_WEIGHTS,
    WeightCheck,
    describe_families,
    suspect_families,
)
from gspo_megatron.rollout.vllm.worker.gspo_vllm_answers import GroupPart

T = TypeVar("T")

CALL_SECONDS = 10.0  # for calls that need no work of the engine
_LOOK_SECONDS = 1.0  # time between two looks at a server that gets weights
# A process's connections break before the process ends. Callers wait this many seconds for the end.
MOMENT = 0.3


@dataclass(frozen=True)
class Weights:
    """A version of the policy's weights on its way to the servers."""

    version: int  # steps that these weights have been trained for
    folder: str | None  # Hugging Face folder; None: not written until a server asks for it
    check: WeightCheck | None = None  # None: the trainer still computes it
    stream: Mapping[str, Any] | None = None  # WeightStream.plan, if rank 0 sends the weights


class WeightChanges:
    """Wakes the tasks that wait for a change of servers or weights."""

    def __init__(self) -> None:
        self._condition = asyncio.Condition()
        self.when_changed: Callable[[], None] = lambda: None

    async def announce(self) -> None:
        async with self._condition:
            self._condition.notify_all()
        self.when_changed()

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        async with self._condition:
            await self._condition.wait_for(condition)


def was_blocked(asked: float) -> bool:
    """Return whether code of an environment has blocked this event loop since `asked`, when a call
    of at most CALL_SECONDS began. Then the call may have ended without its answer by our fault."""
    return time.monotonic() - asked > 2 * CALL_SECONDS


class WeightLoader:
    """Loads the newest weights on single servers.

    Raises ServerGone, ServerRefused or RolloutError if a server fails.
    """

    starts_with_weights = True  # whether a server that this run starts has the newest weights

    def __init__(self, settings: FleetSettings, changes: WeightChanges) -> None:
        self.settings, self.changes = settings, changes
        self.needs_folder = False  # a server waits for the newest weights in a folder
        self._newest: Weights | None = None

    @property
    def newest(self) -> Weights:
        assert self._newest is not None, "weights that nobody has made"
        return self._newest

    def take_weights(self, weights: Weights) -> None:
        """Make these the newest weights."""
        self._newest = weights

    async def add_to_weights(self, **parts: Any) -> None:
        """Add the `folder` or the `check` of the newest weights."""
        self._newest = replace(self.newest, **parts)
        self.needs_folder &= self._newest.folder is None
        await self.changes.announce()

    async def wait_until_folder_is_needed(self) -> None:
        await self.changes.wait_until(lambda: self.needs_folder)

    async def newest_in_folder(self) -> Weights:
        """Return the newest weights, after waiting until they are in a folder."""
        while (weights := self.newest).folder is None:
            self.needs_folder = True
            await self.changes.announce()
            await self.changes.wait_until(lambda seen=weights: self.newest is not seen)
        return weights

    async def first_weights(self, server: Server, started_with: Weights, deadline: float) -> None:
        """Check a new server's weights. A server that did not start with `started_with` first loads
        them."""
        weights = started_with
        if server.start is None or not self.starts_with_weights:
            await self._load(server, weights, deadline)
        while not await self._check(server, weights, at_start=True):
            weights = await self.newest_in_folder()
            await self._load(server, weights, time.monotonic() + self.settings.update_seconds)

    async def renew(self, server: Server, weights: Weights) -> bool:
        """Load new weights on a running server and check them. Returns False if the server was lost
        while it waited for a folder; its restart loads the newest weights."""
        if not (server.stream_key and await self._receive_stream(server, weights)):
            before = server.version
            weights = await self.newest_in_folder()
            if server.version != before:
                return False
            await self._load(server, weights, time.monotonic() + self.settings.update_seconds)
        await self._check(server, weights)
        return True

    async def _receive_stream(self, server: Server, weights: Weights) -> bool:
        """Let rank 0 stream the weights; returns whether that succeeded.

        After a failure, the server gets weights only in folders.
        """
        group = {"key": server.stream_key, "world_size": server.abilities.workers + 1}
        deadline = time.monotonic() + self.settings.update_seconds
        try:
            await self._load(server, weights, deadline, {"plan": weights.stream, **group})
        except (ServerGone, ServerRefused) as error:
            await asyncio.sleep(MOMENT)
            if server.process and server.process.has_ended():
                raise
            if await server.client.why_not_ready(seconds=CALL_SECONDS) is not None:
                raise
            server.stream_failed = True
            wrong = f"cannot take weights from rank 0, and gets them in folders: {error}"
            print(printable(f"{server.name}: {wrong}"))
            return False
        finally:
            server.stream_key = None
        return True

    async def _load(
        self,
        server: Server,
        weights: Weights,
        deadline: float,
        stream: Mapping[str, Any] | None = None,
    ) -> None:
        server.version, start = None, time.monotonic()  # None: the server gets no requests
        seconds = max(deadline - start, 0.1)
        loading = server.client.load_weights(
            weights.folder,
            str(weights.version),
            seconds=seconds,
            packs_again=server.abilities.is_extended,
            stream=stream,
            pause=self._pause(server),
            paused=self._split_responses(server, weights.version, seconds),
        )
        await self._while_it_answers(server, loading)
        server.load_seconds = time.monotonic() - start

    async def _while_it_answers(self, server: Server, work: Coroutine[Any, Any, T]) -> T:
        """Do a part of an update. Raises ServerGone if the server meanwhile answers nothing at all
        for too long. Its engine may be busy for minutes, but its HTTP part answers."""
        task, heard = asyncio.create_task(work), time.monotonic()
        try:
            while not (await asyncio.wait([task], timeout=_LOOK_SECONDS))[0]:
                asked = time.monotonic()
                try:
                    await server.client.figures(
                        seconds=CALL_SECONDS, in_short=server.abilities.gives_parts
                    )
                except ServerGone:
                    silent = time.monotonic() - heard
                    if silent > self.settings.silence_seconds and not was_blocked(asked):
                        raise ServerGone(f"has not answered for {silent:.0f} s") from None
                except ServerRefused:
                    heard = time.monotonic()
                else:
                    heard = time.monotonic()
            return await task
        finally:
            task.cancel()
            await asyncio.wait([task])  # after a failure it still asks the server to go on

    def _pause(self, server: Server) -> Mapping[str, str]:
        """Choose how to pause a server. Responses in progress may continue only if the weights
        version of each token is known afterwards."""
        if not server.in_flight:
            return RECOMPUTE  # no response is in progress
        if not (server.abilities.counts_tokens or server.reports_versions):
            return WAIT
        return KEEP if self.settings.keeps_kv else RECOMPUTE

    @contextlib.asynccontextmanager
    async def _split_responses(
        self, server: Server, version: int, seconds: float
    ) -> AsyncGenerator[None]:
        """While a server is paused, record at which token of each response in progress the new
        weights begin. If the new weights fail to load, no response goes on."""
        responses, counts = tuple(server.in_flight), {}
        if responses and server.abilities.counts_tokens:
            counts = await server.client.response_tokens(seconds=seconds) or {}
        elif server.reports_versions:
            # 0 stands for a count that is not needed: the answers themselves report the versions
            counts = dict.fromkeys((each.name for each in responses), 0)
        try:
            yield
        except BaseException:
            # The server will go on, perhaps with a part of the new weights.
            server.cancel_requests()
            raise
        unknown = [r.name for r in responses if r.answer is None and r.name not in counts]
        ended: set[str] = set()
        if unknown and server.abilities.gives_parts:
            # Only a server with our middleware can tell which responses have ended. On any other
            # server, all responses in `unknown` are taken back.
            with contextlib.suppress(ServerGone, ServerRefused):
                ended = await server.client.take_back(unknown, seconds=seconds)
        # Without the responses that were given up meanwhile: nobody waits for them.
        responses = tuple(each for each in responses if each in server.in_flight)
        split_at_update(responses, counts, version, ended)

    async def _expected_responses(self, version: int) -> WeightCheck | None:
        """Wait for the check of the weights of this version. Returns None if there are newer
        weights now."""
        await self.changes.wait_until(
            lambda: self.newest.version != version or self.newest.check is not None
        )
        return self.newest.check if self.newest.version == version else None

    async def _check(self, server: Server, weights: Weights, *, at_start: bool = False) -> bool:
        """Check that a server has these weights, and let it serve.

        Returns False if there are newer weights, so that the check is no longer possible. Raises
        RolloutError if the server fails the check.
        """
        check = await self._expected_responses(weights.version)
        if check is None:
            return False
        start, seconds = time.monotonic(), self.settings.update_seconds
        if not at_start or server.start is None:
            await self._check_version(server, weights)
        calls = (
            server.client.generate(
                GroupPart(
                    prompt,
                    {"temperature": 0.0, "max_tokens": len(tokens), "ignore_eos": True},
                    self.settings.facts,
                    self.settings.needs.with_routes,
                    salt=self.settings.salt(weights.version),
                    model=self.settings.model(weights.version),
                ),
                seconds=seconds,
            )
            for prompt, tokens in zip(check.prompts, check.tokens, strict=True)
        )
        responses = await self._while_it_answers(server, run_together(calls))
        server.reports_versions = all(each.spans is not None for each in responses)
        problem = check.difference(responses)
        if server.abilities.is_extended:
            compares_all = at_start or problem is not None
            compared = self._suspects(server, weights.folder, whole=compares_all)
            suspects = await self._while_it_answers(server, compared)
            if suspects:
                problem = f"{problem or NOT_THE_WEIGHTS}; {suspects}"
            elif problem is not None:
                problem += (
                    "; the checksums of its tensors equal the folder's, so the fault may be in the "
                    "kernels' own copies of the tensors, in its prefix cache or in the folder"
                )
        if problem is not None:
            raise RolloutError(problem)
        server.version = server.checked_version = weights.version
        server.proven[server.restarts] = weights.version
        server.why_out, server.heard = None, time.monotonic()
        server.check_seconds = server.heard - start
        await self.changes.announce()
        return True

    async def _check_version(self, server: Server, weights: Weights) -> None:
        own = await server.client.weight_version(seconds=CALL_SECONDS)
        if own != str(weights.version):
            raise RolloutError(f"says that it has version {own} of them, not {weights.version}")

    async def _suspects(self, server: Server, folder: str | None, *, whole: bool) -> str:
        """Describe what differs between the server's weights and this folder (None: the newest).

        whole: compare all tensors, which takes a while.
        """
        if not whole:
            return ""
        folder = folder or (await self.newest_in_folder()).folder
        return await self._suspect_tensors(server, folder)

    async def _suspect_tensors(self, server: Server, folder: str | None) -> str:
        """Describe the server's families of tensors that differ from those in the folder."""
        seconds = self.settings.update_seconds
        of_workers = await server.client.weight_sums(None, seconds=seconds)
        expected, *_ = await server.client.weight_sums(folder, seconds=seconds)
        suspects = describe_families(suspect_families(of_workers, expected), len(expected))
        return f"different from the folder: {suspects}" if suspects else ""

    async def release(self, server: Server) -> None:
        """Let the server forget weights that no request needs any more."""
