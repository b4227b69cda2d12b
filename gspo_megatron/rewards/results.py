"""Reads and compares the result of a solution's function, outside of the sandbox.

The bytes are untrusted: the solution may have written them itself. So nothing in them is hashed,
because chosen values can make sets and dictionaries slow. The work grows with the number of bytes
and has a time limit. Any bytes give either a result or an UnreadableError.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

_SECONDS = 5.0  # limit for reading and comparing a result
_LARGEST_KEY = 1 << 12  # bits of an integer key; converting it to text takes quadratic time
_KINDS = (
    *("int", "float", "complex", "bytes"),
    *("list", "tuple", "set", "frozenset", "dict"),
)


class UnreadableError(Exception):
    """Raised if the bytes are not a result; the text says why."""


_ODD = object()  # a value that JSON lacks, such as a set or bytes; it equals no expected value


@dataclass(frozen=True)
class _Pairs:
    """A dictionary as (key, value) pairs, with unique keys as JSON text, sorted."""

    pairs: tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Result:
    value: Any
    deadline: float

    def equals(self, expected: Any) -> bool:
        """Whether the result equals the JSON value `expected`.

        Tuples count as lists, and keys as texts. Where `expected` has a float, the result may
        differ from it by 1e-6, except inside dictionaries."""
        try:
            return _same(self.value, expected, self.deadline, exact=False)
        except (RecursionError, MemoryError) as error:
            raise UnreadableError("no result") from error


def read_result(content: bytes, seconds: float = _SECONDS) -> Result:
    """Read the output of `sandbox_harness.encode`. Raises UnreadableError."""
    deadline = time.monotonic() + seconds
    try:
        parsed = json.loads(
            content,
            object_pairs_hook=_marked,
            parse_int=_refuse,
            parse_float=_refuse,
            parse_constant=_refuse,
        )
        return Result(_value(parsed, deadline), deadline)
    except UnreadableError:
        raise
    except (ValueError, TypeError, ArithmeticError, RecursionError, MemoryError) as error:
        raise UnreadableError("no result") from error


class _Marked(tuple[str, Any]):
    """The only item of a JSON object: (kind of value, content)."""


def _marked(pairs: Sequence[tuple[str, Any]]) -> _Marked:
    if len(pairs) != 1 or pairs[0][0] not in _KINDS:
        raise ValueError("an object that is no value")
    return _Marked(pairs[0])


def _refuse(text: str) -> NoReturn:
    raise ValueError("a bare number")


def _value(node: Any, deadline: float) -> Any:
    if time.monotonic() > deadline:
        raise UnreadableError("no result: it takes too long to read")
    if node is None or isinstance(node, (bool, str)):
        return node
    if not isinstance(node, _Marked):
        raise ValueError("a bare list")
    kind, content = node
    if kind == "int":
        return int(content, 16)
    if kind == "float":
        return float.fromhex(content)
    if kind in ("complex", "bytes"):
        return _ODD
    if not isinstance(content, list):
        raise ValueError("no list of items")
    if kind == "dict":
        pairs = []
        for pair in content:
            if not isinstance(pair, list) or len(pair) != 2:
                raise ValueError("no pair of key and value")
            pairs.append((_key(_value(pair[0], deadline)), _value(pair[1], deadline)))
        return _sorted(pairs)
    items = [_value(item, deadline) for item in content]
    return items if kind in ("list", "tuple") else _ODD


def _key(value: Any) -> str:
    """Return a key as the text that `str` writes."""
    if isinstance(value, str):
        return value
    if isinstance(value, int) and value.bit_length() > _LARGEST_KEY:
        raise ValueError("a key of too many digits")
    if value is None or isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, list):  # only tuples can be keys
        end = ",)" if len(value) == 1 else ")"
        return "(" + ", ".join(repr(v) if isinstance(v, str) else _key(v) for v in value) + end
    raise ValueError("a key that no expected value has")


def _sorted(pairs: list[tuple[str, Any]]) -> _Pairs:
    """Sort pairs by key. If a key occurs several times, its last value counts."""
    ordered = sorted(pairs, key=lambda pair: pair[0])  # pairs of one key stay in their order
    following = [*ordered[1:], None]
    return _Pairs(
        tuple(
            pair for pair, after in zip(ordered, following) if after is None or pair[0] != after[0]
        )
    )


def _same(found: Any, expected: Any, deadline: float, *, exact: bool) -> bool:
    if time.monotonic() > deadline:
        raise UnreadableError("no result: it takes too long to compare")
    if isinstance(expected, (list, tuple)):
        return (
            isinstance(found, list)
            and len(found) == len(expected)
            and all(_same(*pair, deadline, exact=exact) for pair in zip(found, expected))
        )
    if isinstance(expected, dict):
        if not isinstance(found, _Pairs) or len(found.pairs) != len(expected):
            return False
        other = _sorted([(str(key), value) for key, value in expected.items()]).pairs
        return all(
            key == name and _same(value, item, deadline, exact=True)
            for (key, value), (name, item) in zip(found.pairs, other)
        )
    if not exact and isinstance(expected, float) and isinstance(found, (int, float)):
        try:
            return math.isclose(found, expected, rel_tol=1e-6, abs_tol=1e-6)
        except OverflowError:  # an integer beyond the range of floats
            return False
    return bool(found == expected)
