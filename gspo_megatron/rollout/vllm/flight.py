"""Responses on their way, and which weights drew which of their tokens.

New weights come while responses are under way. The server stands still then, and tells how many
tokens each response has: these are of the weights before, the next ones of the new weights.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gspo_megatron.rollout.vllm.worker.gspo_vllm_answers import Response


@dataclass(eq=False)
class Flight:
    """A response on its way from a server."""

    version: int  # of the weights that draw its next token
    # (version, tokens up to its last one) of the weights before
    spans: list[tuple[int, int]] = field(default_factory=list)
    name: str = field(default_factory=lambda: uuid.uuid4().hex)  # for the server
    response: Response | None = None
    call: asyncio.Task[Any] | None = None  # of its part
    is_taken_back: bool = False  # it had no token yet when new weights came
    when_taken_back: Callable[[Flight], None] | None = None

    @property
    def first_version(self) -> int:
        return self.spans[0][0] if self.spans else self.version

    def versions(self, count: int) -> np.ndarray:
        """[count] int32: the version of the weights that drew each token of the response."""
        return versions_of([*self.spans, (self.version, count)], count)

    def arrive(self, response: Response) -> None:
        """It has ended. What the server tells of versions counts, where it tells them."""
        count = len(response.token_ids)
        if response.spans is None:
            response.versions = self.versions(count)
        else:
            # a server without any update has a word of its own for its first weights
            first = self.first_version
            spans = [(int(n) if n.isdecimal() else first, end) for n, end in response.spans]
            response.versions = versions_of(spans, count)
        self.response = response

    def take_back(self) -> None:
        """It is sent again as if it had never been sent."""
        self.is_taken_back = True
        if self.when_taken_back is not None:
            self.when_taken_back(self)


def versions_of(spans: Iterable[tuple[int, int]], count: int) -> np.ndarray:
    """[count] int32 of spans (version, tokens up to its last one); ends beyond `count` mean it."""
    versions, ends = zip(*spans, strict=True)
    if len(versions) == 1 and ends[0] >= count:  # as nearly always: one number for all tokens
        return np.ndarray((count,), np.int32, np.array(versions, np.int32), strides=(0,))
    lengths = np.diff(np.minimum(ends, count), prepend=0)
    assert (lengths >= 0).all() and lengths.sum() == count, f"spans {versions} {ends} of {count}"
    return np.repeat(np.array(versions, dtype=np.int32), lengths)


def split(
    flights: Iterable[Flight],
    counts: Mapping[str, int],
    version: int,
    ended: Collection[str] = (),
) -> None:
    """The server still stands, and goes on with `version`.

    counts: tokens of the responses that it has begun, by name. These go on. One that it does not
    know, and whose answer is not here, has no token yet; or its answer is still on its way, which
    would be of the weights before. Where it cannot be told which, it is taken back. ended: names of
    those of which it is known that they have ended.
    """
    for flight in flights:
        if flight.response is not None or flight.is_taken_back or flight.name in ended:
            continue
        if flight.name not in counts:
            flight.take_back()
            continue
        flight.spans.append((flight.version, counts[flight.name]))
        flight.version = version
