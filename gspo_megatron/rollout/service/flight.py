"""Requests on their way, and which weights drew which of their tokens.

New weights come while responses are under way. The server stands still then, and tells how many
tokens each response has: these are of the weights before, the next ones of the new weights.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(eq=False)
class Flight:
    """A request on its way to a server."""

    version: int  # of the weights that draw its next token
    # (version, tokens up to its last one) of the weights before
    spans: list[tuple[int, int]] = field(default_factory=list)
    name: str = field(default_factory=lambda: uuid.uuid4().hex)  # for the server
    call: asyncio.Task[Any] | None = None
    is_taken_back: bool = False  # it had no token yet when new weights came

    @property
    def is_answered(self) -> bool:
        return self.call is not None and self.call.done()

    @property
    def first_version(self) -> int:
        return self.spans[0][0] if self.spans else self.version

    def versions(self, count: int) -> np.ndarray:
        """[count] int32: the version of the weights that drew each token of the response."""
        return versions_of([*self.spans, (self.version, count)], count)

    def take_back(self) -> None:
        """It is sent again as if it had never been sent."""
        self.is_taken_back = True
        if self.call is not None:
            self.call.cancel()


def versions_of(spans: Iterable[tuple[int, int]], count: int) -> np.ndarray:
    """[count] int32 of spans (version, tokens up to its last one); ends beyond `count` mean it."""
    versions, ends = zip(*spans, strict=True)
    lengths = np.diff(np.minimum(ends, count), prepend=0)
    assert (lengths >= 0).all() and lengths.sum() == count, f"spans {versions} {ends} of {count}"
    return np.repeat(np.array(versions, dtype=np.int32), lengths)


def split(flights: Iterable[Flight], counts: Mapping[str, int], version: int) -> None:
    """The server still stands, and goes on with `version`.

    counts: tokens of the requests that it has begun, by name. A request that has begun goes on. One
    that it does not know and has not answered has no token yet; or its answer is still on its way,
    which would be of the weights before. It cannot be told which, so it is taken back.
    """
    for flight in flights:
        if flight.is_answered:
            continue
        if flight.name not in counts:
            flight.take_back()
            continue
        flight.spans.append((flight.version, counts[flight.name]))
        flight.version = version
