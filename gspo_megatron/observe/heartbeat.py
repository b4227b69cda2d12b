"""Heartbeats: long work reports its progress, and the hang watch listens.

This module is below both, so that neither has to import the other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

_listeners: list[Callable[[], None]] = []


def heartbeat() -> None:
    """This process has finished a piece of work: a tensor written or read, a response scored.

    For work without forward passes; from any thread, at almost no cost. Each piece must take less
    than half of training.hang_timeout_seconds.
    """
    for listener in tuple(_listeners):
        listener()


@contextlib.contextmanager
def heard_by(listener: Callable[[], None]) -> Iterator[None]:
    """Inside the context, `listener` is called at each heartbeat."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
