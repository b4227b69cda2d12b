"""Responses in flight (responses in progress on a server), and the weights version of each of their
tokens.

New weights may arrive while responses are in progress. The server is then paused and reports how
many tokens each response has. The old weights generated these tokens; the new weights generate the
next ones.
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
    """A response that a server generates."""

    version: int  # weights version that generates the next token
    # For each earlier version: (version, number of tokens up to the last token of this version).
    spans: list[tuple[int, int]] = field(default_factory=list)
    name: str = field(default_factory=lambda: uuid.uuid4().hex)  # the request's name on the server
    answer: Response | None = None
    call: asyncio.Task[Any] | None = None  # the HTTP call of its group request
    is_taken_back: bool = False  # whether it had no token yet when new weights came
    when_taken_back: Callable[[InFlightResponse], None] | None = None

    @property
    def first_version(self) -> int:
        return self.spans[0][0] if self.spans else self.version

    def versions(self, count: int) -> np.ndarray:
        """Return the weights version of each token of the response, [count] int32."""
        return versions_of([*self.spans, (self.version, count)], count)

    def arrive(self, response: Response) -> None:
        """Store the answer. If the server reports versions, these are used instead of our own
        record."""
        count = len(response.token_ids)
        if response.spans is None:
            response.versions = self.versions(count)
        else:
            # Before the first update, a server reports a version name that is not a number.
            first = self.first_version
            spans = [(int(n) if n.isdecimal() else first, end) for n, end in response.spans]
            response.versions = versions_of(spans, count)
        self.answer = response

    def take_back(self) -> None:
        """Give the response up. It will be generated again from the start."""
        self.is_taken_back = True
        if self.when_taken_back is not None:
            self.when_taken_back(self)


def versions_of(spans: Iterable[tuple[int, int]], count: int) -> np.ndarray:
    """Return the version of each token, [count] int32.

    spans: for each version (version, number of tokens up to the last token of this version). A
    number above `count` means `count`.
    """
    versions, ends = zip(*spans, strict=True)
    # In the usual case all tokens have one version, which is stored once.
    if len(versions) == 1 and ends[0] >= count:
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
    """Record, in each response, that the paused server will continue with the weights `version`.

    counts: for each response that the server has begun, by name, the number of its tokens. These
    responses continue. ended: names of responses that are known to have ended. If a response is
    neither in `counts` nor in `ended` and has no answer, there are two cases: it has no token yet,
    or the old weights have completed it and its answer is on its way. The two cases cannot be
    distinguished, so such a response is taken back.
    """
    for each in responses:
        if each.answer is not None or each.is_taken_back or each.name in ended:
            continue
        if each.name not in counts:
            each.take_back()
            continue
        each.spans.append((each.version, counts[each.name]))
        each.version = version
