"""Runs coroutines: many at the same time, or one from a function that is not async."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Coroutine, Iterable
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
