"""Runs coroutines: many at the same time, or one from a function that is not async. Also counts the
seconds in which calls run."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Coroutine, Generator, Iterable
from contextlib import contextmanager
from typing import Any, TypeVar

_T = TypeVar("_T")


async def gathered(works: Iterable[Coroutine[Any, Any, _T]]) -> list[_T]:
    """Run coroutines at the same time; returns their results in order.

    If one raises an error, the others are cancelled. This call returns when all have ended.
    """
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:  # if one task has raised an error, the others still run
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class OwnLoop:
    """An event loop for code that is not async. HTTP clients and workers belong to one loop, so
    their owner keeps this object."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def has_run(self) -> bool:
        """Whether a coroutine has run in this loop."""
        return self._loop is not None

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine to its end; returns its result."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            weakref.finalize(self, self._loop.close)
        return self._loop.run_until_complete(work)


class BusySeconds:
    """Counts the seconds in which at least one call is running."""

    def __init__(self) -> None:
        self._seconds, self._since = 0.0, 0.0
        self.calls = 0  # number of calls that are running

    @contextmanager
    def running(self) -> Generator[None]:
        """Count the time inside the `with` block."""
        if not self.calls:
            self._since = time.perf_counter()
        self.calls += 1
        try:
            yield
        finally:
            self._count()
            self.calls -= 1

    def take(self) -> float:
        """Return the seconds that were counted since the last call of this method."""
        if self.calls:
            self._count()
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _count(self) -> None:
        now = time.perf_counter()
        self._seconds, self._since = self._seconds + now - self._since, now
