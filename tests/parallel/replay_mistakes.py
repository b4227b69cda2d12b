"""What the ranks do in test_replay_traps: updates with one mistake in them."""

from __future__ import annotations

from typing import Any

from tests.parallel.replays import Watched, watched_update
from tests.unit.routing import mistakes


def mistaken_update(mistake: str, **arguments: Any) -> Watched:
    """`watched_update` with a mistake of tests.unit.routing.mistakes."""
    with getattr(mistakes, mistake)():
        return watched_update(**arguments)
