"""Heartbeats of long work: the work reports each piece that is done, and whoever watches the run
hears it.

This module is below all that works and all that watches, so that neither imports the other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

_listeners: list[Callable[[], None]] = []


def heartbeat() -> None:
    """A piece of work is done: a tensor written or read, a response scored.

    For work without forward passes; may be called from any thread, and costs almost nothing. A
    piece must take less than half of training.hang_timeout_seconds.
    """
    for listener in tuple(_listeners):
        listener()


@contextlib.contextmanager
def heard_by(listener: Callable[[], None]) -> Iterator[None]:
    """Inside the context, each heartbeat calls `listener`."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
