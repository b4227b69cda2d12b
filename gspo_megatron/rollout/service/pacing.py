"""Which request goes next, how many a server has at a time, and how long it has any."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

MOST_REQUESTS = 512  # on their way to one server: its scheduler likes a queue
FEWEST_REQUESTS = 8  # however full its cache is
_SHRINKS_BY = 0.75
_GROWS_BY = 1 / 32  # of the most, at each look
_FULL, _FILLING = 0.97, 0.85  # shares of the cache

Chosen = TypeVar("Chosen")


class Line(Generic[Chosen]):
    """Requests that wait for a server. Those of an earlier draw go first, in their order."""

    def __init__(self) -> None:
        # by draw and the version of the weights that it needs
        self._waiting: dict[tuple[str, int], deque[asyncio.Future[Chosen]]] = {}

    def join(self, draw: str, version: int) -> asyncio.Future[Chosen]:
        """Draws go in the order of their names."""
        turn: asyncio.Future[Chosen] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault((draw, version), deque()).append(turn)
        return turn

    def admit(self, choose: Callable[[int], Chosen | None]) -> None:
        """Let requests go while `choose`, of the version that they need, finds a server. What it
        raises is raised where the requests wait. A draw whose version no server has yet keeps no
        other one waiting."""
        for key in sorted(self._waiting):
            turns = self._waiting[key]
            while turns:
                if turns[0].done():  # cancelled
                    turns.popleft()
                    continue
                try:
                    chosen = choose(key[1])
                except Exception as error:  # noqa: BLE001 (raised where it is awaited)
                    turns.popleft().set_exception(error)
                    continue
                if chosen is None:
                    break
                turns.popleft().set_result(chosen)
            if not turns:
                del self._waiting[key]


class Window:
    """How many requests may be on their way to a server: fewer after it had to preempt some or
    with a full cache, and slowly more while its cache has room."""

    def __init__(self, most: int = MOST_REQUESTS) -> None:
        self.most = self.size = most
        self._preemptions = 0.0

    def look(self, figures: Mapping[str, float], in_flight: int) -> None:
        """figures: vLLM's own metrics."""
        usage = figures.get("kv_cache_usage_perc", 0.0)
        count = figures.get("num_preemptions_total", 0.0)
        preempted, self._preemptions = count > self._preemptions, count
        # New weights preempt all requests, too (`kv_after_update: recompute`), in any cache.
        if usage >= (_FILLING if preempted else _FULL):
            # it has been told already, unless requests have become as few as that
            if in_flight <= self.size:
                fewer = int(in_flight * _SHRINKS_BY)
                self.size = min(self.size, max(fewer, FEWEST_REQUESTS))
        elif usage < _FILLING and in_flight >= self.size:
            self.size = min(self.most, self.size + max(1, int(self.most * _GROWS_BY)))


@dataclass
class Clock:
    """Seconds in which at least one thing was under way."""

    now: Callable[[], float] = time.monotonic
    _before: float = 0.0  # until the last time that nothing was
    _since: float = 0.0
    _under_way: int = field(default=0)

    def begin(self) -> None:
        if not self._under_way:
            self._since = self.now()
        self._under_way += 1

    def end(self) -> None:
        self._under_way -= 1
        assert self._under_way >= 0, "more ends than beginnings"
        if not self._under_way:
            self._before += self.now() - self._since

    @property
    def seconds(self) -> float:
        return self._before + (self.now() - self._since if self._under_way else 0.0)
