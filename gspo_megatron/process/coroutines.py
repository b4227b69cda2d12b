"""Runs coroutines: many at the same time, or one from a function that is not async. Also counts the
seconds in which calls run."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

_T = TypeVar("_T")
_THREADS = 512


def allow_many_threads(loop: asyncio.AbstractEventLoop) -> None:
    """Let `asyncio.to_thread` make up to 512 calls at a time in this loop. By default it makes at
    most 32, or 4 more than there are cores. But the calls of environments mostly wait."""
    loop.set_default_executor(ThreadPoolExecutor(_THREADS, "to_thread"))


async def run_together(coroutines: Iterable[Coroutine[Any, Any, _T]]) -> list[_T]:
    """Run coroutines at the same time; returns their results in order.

    If one raises an error, the others are cancelled. This call returns when all have ended.
    """
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:  # if one task has raised an error, the others still run
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


async def outcome_of(call: Callable[[], Awaitable[_T]]) -> tuple[_T | None, BaseException | None]:
    """Call the user's code. Returns its result and None, or None and its error. Only a
    KeyboardInterrupt is raised: a SystemExit would end the event loop, and a CancelledError would
    look as if the caller had been cancelled."""

    async def run() -> tuple[_T | None, BaseException | None]:
        try:
            return await call(), None
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 (the user's code may raise anything)
            return None, error

    task = asyncio.ensure_future(run())
    try:
        await asyncio.wait([task])
    except asyncio.CancelledError:  # the caller no longer needs the result
        task.cancel()
        await asyncio.wait([task])
        raise
    return task.result()


class OwnLoop:
    """An event loop for code that is not async. HTTP clients and workers belong to one loop, so
    their owner keeps this object."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def has_run(self) -> bool:
        """Whether a coroutine has run in this loop."""
        return self._loop is not None

    def run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine to its end; returns its result."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            weakref.finalize(self, self._loop.close)
        return self._loop.run_until_complete(coroutine)


class BusySeconds:
    """Counts the seconds in which at least one call, or other activity, is in progress."""

    def __init__(self) -> None:
        self._counted, self._since = 0.0, 0.0
        self.calls = 0  # number of calls in progress

    def begin(self, count: int = 1) -> None:
        if not self.calls:
            self._since = time.perf_counter()
        self.calls += count

    def end(self, count: int = 1) -> None:
        self._counted = self.seconds
        self._since = time.perf_counter()
        self.calls -= count
        assert self.calls >= 0, "more ends than beginnings"

    @contextmanager
    def running(self) -> Generator[None]:
        """Count the time inside the `with` block."""
        self.begin()
        try:
            yield
        finally:
            self.end()

    @property
    def seconds(self) -> float:
        """The seconds that were counted so far."""
        return self._counted + (time.perf_counter() - self._since if self.calls else 0.0)

    def take(self) -> float:
        """Return the seconds that were counted since the last call of this method."""
        seconds = self.seconds
        self._counted, self._since = 0.0, time.perf_counter()
        return seconds
