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
class InFlightResponse:
    """A response on its way from a server."""

    version: int  # of the weights that draw its next token
    # (version, tokens up to its last one) of the weights before
    spans: list[tuple[int, int]] = field(default_factory=list)
    name: str = field(default_factory=lambda: uuid.uuid4().hex)  # for the server
    answer: Response | None = None
    call: asyncio.Task[Any] | None = None  # of its group request
    is_taken_back: bool = False  # it had no token yet when new weights came
    when_taken_back: Callable[[InFlightResponse], None] | None = None

    @property
    def first_version(self) -> int:
        return self.spans[0][0] if self.spans else self.version

    def versions(self, count: int) -> np.ndarray:
        """[count] int32: the version of the weights that drew each token of the response."""
        return versions_of([*self.spans, (self.version, count)], count)

    def arrive(self, response: Response) -> None:
        """Take the answer. Where the server reports versions, these count."""
        count = len(response.token_ids)
        if response.spans is None:
            response.versions = self.versions(count)
        else:
            # a server without any update has a word of its own for its first weights
            first = self.first_version
            spans = [(int(n) if n.isdecimal() else first, end) for n, end in response.spans]
            response.versions = versions_of(spans, count)
        self.answer = response

    def take_back(self) -> None:
        """Give it up, so that it is sent again as if it had never been sent."""
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


def split_at_update(
    responses: Iterable[InFlightResponse],
    counts: Mapping[str, int],
    version: int,
    ended: Collection[str] = (),
) -> None:
    """Mark in the responses that the server, which still stands, goes on with `version`.

    counts: tokens of the responses that it has begun, by name. These go on. One that it does not
    know, and whose answer is not here, has no token yet; or its answer is still on its way, which
    would be of the weights before. Where it cannot be told which, it is taken back. ended: names of
    those of which it is known that they have ended.
    """
    for each in responses:
        if each.answer is not None or each.is_taken_back or each.name in ended:
            continue
        if each.name not in counts:
            each.take_back()
            continue
        each.spans.append((each.version, counts[each.name]))
        each.version = version
