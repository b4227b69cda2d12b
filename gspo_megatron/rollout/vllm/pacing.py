"""Which responses go next, how many a server has at a time, and how long it has any."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

MOST_REQUESTS = 512  # on their way to one server: its scheduler likes a queue
FEWEST_REQUESTS = 8  # however full its cache is
_SHRINKS_BY = 0.75
_GROWS_BY = 1 / 32  # of the most, at each look
_FULL, _FILLING = 0.97, 0.85  # shares of the cache

Chosen = TypeVar("Chosen")


@dataclass(eq=False)
class Turn(Generic[Chosen]):
    """So many responses that wait for places. `granted` gets (server, places) of one or more
    servers, for at least one and at most so many in all."""

    key: tuple[str, int]
    places: int
    granted: asyncio.Future[list[tuple[Chosen, int]]]
    is_waiting: bool = True


class Line(Generic[Chosen]):
    """Responses that wait for a server. Those of an earlier draw go first, in their order."""

    def __init__(self) -> None:
        # by draw and the version of the weights that it needs
        self._waiting: dict[tuple[str, int], deque[Turn[Chosen]]] = {}
        self.places = 0  # that are waited for

    def join(self, draw: str, version: int, places: int, *, first: bool = False) -> Turn[Chosen]:
        """Draws go in the order of their names. first: of those of its draw."""
        granted: asyncio.Future[list[tuple[Chosen, int]]]
        granted = asyncio.get_running_loop().create_future()
        turn = Turn((draw, version), places, granted)
        turns = self._waiting.setdefault(turn.key, deque())
        turns.appendleft(turn) if first else turns.append(turn)
        self.places += places
        return turn

    def leave(self, turn: Turn[Chosen]) -> None:
        """It waits no more, if it still did."""
        if turn.is_waiting:
            turn.is_waiting = False
            self._waiting[turn.key].remove(turn)
            self.places -= turn.places

    def admit(self, choose: Callable[[int, float, int], tuple[Chosen, int] | None]) -> None:
        """Let responses go while `choose` finds a server for them. It is given the version that
        they need; a version whose servers it is to leave alone, because draws before them wait for
        these; and how many they are. What it raises is raised where they wait. A draw whose version
        no server has yet keeps no other one waiting."""
        kept = math.inf
        for key in sorted(self._waiting):
            turns, version = self._waiting[key], key[1]
            while turns and self._grant(turns, partial(choose, version, kept)):
                pass
            if turns:
                kept = min(kept, version)
            else:
                del self._waiting[key]

    def _grant(
        self, turns: deque[Turn[Chosen]], choose: Callable[[int], tuple[Chosen, int] | None]
    ) -> bool:
        """What there is for the first one; whether that was anything."""
        turn, granted = turns[0], []
        if turn.granted.done():  # cancelled
            self.leave(turn)
            return True
        try:
            left = turn.places
            while left and (found := choose(left)) is not None:
                granted.append(found)
                left -= found[1]
        except Exception as error:  # noqa: BLE001 (raised where it is awaited)
            self.leave(turn)
            turn.granted.set_exception(error)
            return True
        if granted:
            self.leave(turn)
            turn.granted.set_result(granted)
        return bool(granted)


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

    def begin(self, count: int = 1) -> None:
        if not self._under_way:
            self._since = self.now()
        self._under_way += count

    def end(self, count: int = 1) -> None:
        self._under_way -= count
        assert self._under_way >= 0, "more ends than beginnings"
        if not self._under_way:
            self._before += self.now() - self._since

    @property
    def seconds(self) -> float:
        return self._before + (self.now() - self._since if self._under_way else 0.0)
