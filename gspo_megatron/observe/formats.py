"""How figures are written for people: on the terminal, in tables, in the report."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

MISSING = "–"


def number(value: float | None, digits: int = 3) -> str:
    """A number with `digits` significant digits, without needless exponents."""
    if value is None:
        return MISSING
    if not math.isfinite(value):
        return "not finite"
    size = abs(value)
    if value == 0:
        return "0"
    if size >= 10**6 or size < 10**-4:
        return f"{value:.{digits - 1}e}"
    if size >= 10**digits:
        return f"{value:,.0f}"
    decimals = max(0, digits - 1 - math.floor(math.log10(size)))
    return f"{value:.{decimals}f}"


def fixed(value: float | None) -> str:
    """A number of order one, with three decimals, so that a column of them is aligned."""
    if value is None or not math.isfinite(value):
        return number(value)
    return f"{value:.3f}"


def percent(value: float | None) -> str:
    """A share between 0 and 1 as a percentage."""
    if value is None or not math.isfinite(value):
        return number(value)
    return f"{100 * value:.1f}%"


def points(value: float | None) -> str:
    """The difference of two shares, in percentage points, without the unit."""
    if value is None or not math.isfinite(value):
        return number(value)
    return f"{100 * value:.1f}"


def duration(seconds: float | None) -> str:
    """Seconds as 0.41 s, 12 s, 3:05, 2:03:05 or 4d 02:03."""
    if seconds is None or not math.isfinite(seconds):
        return MISSING
    if seconds < 10:
        return f"{seconds:.2f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 24:
        days, hours = divmod(hours, 24)
        return f"{days}d {hours:02d}:{minutes:02d}"
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def clip_fraction(record: Mapping[str, Any]) -> float | None:
    """The share of what the objective clips: of sequences if it logs that, else of tokens."""
    for unit in ("sequence", "token"):
        value = record.get(f"clip/{unit}/binding")
        if value is not None:
            return value
    return None
