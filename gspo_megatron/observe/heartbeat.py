"""Signs of life: work that may take long says how it gets on, and whoever watches hears it.

It stands below all that works and all that watches, so that neither has to know the other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

_listeners: list[Callable[[], None]] = []


def heartbeat() -> None:
    """This process has got a piece of its work done: a tensor written or read, a response scored.

    For work that runs no forward pass, from any thread, at almost no cost. A piece is to take less
    than half of training.hang_timeout_seconds.
    """
    for listener in tuple(_listeners):
        listener()


@contextlib.contextmanager
def heard_by(listener: Callable[[], None]) -> Iterator[None]:
    """Inside the context, `listener` is called at each sign of life."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
