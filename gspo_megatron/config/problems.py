"""How a configuration problem reads: `section.key = value: what is wrong; what is legal`."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any

_LONGEST_VALUE = 200  # characters; a path should be whole


def problem(key: str, value: Any, wrong: str) -> str:
    """One line about one key; `wrong` says what is wrong and, after a semicolon, what is legal."""
    return f"{key} = {format_value(value)}: {wrong}"


def format_value(value: Any) -> str:
    """A value as the user could have written it, on one line and not too long."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(value)
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 3] + "..."


def nearest(name: str, candidates: Iterable[str], count: int = 3) -> list[str]:
    """The candidates most similar to `name`, best first; empty when none is close."""
    by_folded = {candidate.lower(): candidate for candidate in candidates}
    found = difflib.get_close_matches(name.lower(), list(by_folded), n=count, cutoff=0.61)
    return [by_folded[folded] for folded in found]


def did_you_mean(names: Sequence[str]) -> str:
    """`did you mean a or b?` for at least one name."""
    return f"did you mean {' or '.join(names)}?"


def suggest(name: str, candidates: Sequence[str]) -> str:
    """The nearest candidates, or all of them where none is near and the list is short."""
    close = nearest(name, candidates)
    return did_you_mean(close) if close else f"legal: {', '.join(candidates)}"
