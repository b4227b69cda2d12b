"""Checks the result of a reward function: a number, rewards of turns, or named parts."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real

import numpy as np

from gspo_megatron.types import Reasoned, TurnRewards

SHOWN_REASON = 2000  # number of characters; longer reasons lose their middle
SHOWN_CHARACTERS = 200  # a value, prompt or response in an error message is cut to this length

# A part is logged as reward/NAME. The names in this list belong to other metrics, or are reserved.
_TAKEN = ("mean", "std", "shaped_mean", "zero_spread_groups", "errors", "failed_groups", "timeouts")
_PART = re.compile(r"[A-Za-z0-9_.-]+")


class NoRewardError(ValueError):
    """Raised if a result is no reward; the text says what was returned and what is wanted."""


@dataclass(frozen=True)
class Score:
    """The reward of one response."""

    rewards: np.ndarray  # float64 [turns], or [1] for a reward of the whole response
    ends: np.ndarray | None = None  # int64 [turns], see TurnRewards; None for the whole response
    # the parts' values by name, in sorted order
    parts: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""  # the function's reason for this reward
    figures: Mapping[str, float] = field(default_factory=dict)  # figures for metrics, by name


def checked(value: object, num_tokens: int) -> Score:
    """Check a function's result for a response of `num_tokens` tokens.

    If the function returned parts, `rewards` is empty. Scorer later adds the parts up with their
    weights. Raises NoRewardError."""
    if isinstance(value, TurnRewards):
        return _checked_turns(value, num_tokens)
    if isinstance(value, Mapping):
        return Score(np.empty(0), parts=_checked_parts(value))
    if not isinstance(value, (Real, np.bool_)):
        raise NoRewardError(f"{shorten(value)} of type {type(value).__name__}; a number is wanted")
    number = _finite(value, "")
    figures = _checked_figures(value.figures) if isinstance(value, Reasoned) else {}
    return Score(np.array([number]), reason=_reason_of(value), figures=figures)


def _checked_figures(figures: Mapping[str, object]) -> dict[str, float]:
    return {n: _finite(each, f" as figure {shorten(n)}") for n, each in figures.items()}


def is_free_name(name: object) -> bool:
    """Whether a part or figure may have this name."""
    return isinstance(name, str) and bool(_PART.fullmatch(name)) and name not in _TAKEN


def _reason_of(value: object) -> str:
    """Return the reason in a reward, if it has one. The middle of a long reason is left out."""
    reason = value.reason if isinstance(value, Reasoned) else ""
    if not isinstance(reason, str):
        raise NoRewardError(f"{shorten(reason)} as reason; a string is wanted")
    half = SHOWN_REASON // 2
    return reason if len(reason) <= SHOWN_REASON else f"{reason[:half]} … {reason[-half:]}"


def _finite(value: object, place: str) -> float:
    """Convert a finite number to float (a boolean to 0 or 1), and refuse anything else."""
    if isinstance(value, (Real, np.bool_)):
        with contextlib.suppress(OverflowError):  # an integer beyond the range of a float
            if math.isfinite(number := float(value)):
                return number
    raise NoRewardError(f"{shorten(value)}{place}; a finite number is wanted")


def _checked_parts(parts: Mapping[object, object]) -> dict[str, float]:
    if not parts:
        raise NoRewardError("no parts; at least one is wanted")
    finite_parts: dict[str, float] = {}
    for name, value in parts.items():
        if not isinstance(name, str) or not _PART.fullmatch(name):
            raise NoRewardError(
                f"a part named {shorten(name)}; it is logged as reward/NAME: letters, digits and "
                "_ . - are wanted"
            )
        if name in _TAKEN:
            raise NoRewardError(
                f"a part named {name!r}; reward/{name} is another metric: choose another name"
            )
        finite_parts[name] = _finite(value, f" as part {name!r}")
    return {name: finite_parts[name] for name in sorted(finite_parts)}


def _checked_turns(turns: TurnRewards, num_tokens: int) -> Score:
    rewards = _numbers("rewards", turns.rewards, "biuf").astype(np.float64)
    ends = _numbers("ends", turns.ends, "iu").astype(np.int64)
    if len(rewards) != len(ends):
        counts = f"{len(rewards)} rewards and {len(ends)} ends of turns"
        raise NoRewardError(f"{counts}; each turn needs one reward and one end")
    bad = ~np.isfinite(rewards)
    if bad.any():
        place = int(bad.argmax())
        raise NoRewardError(f"{rewards[place]} for turn {place}; finite numbers are wanted")
    with np.errstate(over="ignore"):
        total = rewards.sum()
    if not math.isfinite(total):
        raise NoRewardError(f"turns whose rewards add up to {total}; a finite sum is wanted")
    rises = np.diff(ends, prepend=0)
    if (rises <= 0).any():
        place = int((rises <= 0).argmax())
        before = ends[place - 1] if place else 0
        raise NoRewardError(
            f"end {ends[place]} for turn {place}; it must be above its start, {before}"
        )
    if len(ends) == 0 or ends[-1] != num_tokens:
        last = f"{ends[-1]} as the last end" if len(ends) else "no turns"
        raise NoRewardError(f"{last}; the last turn must end at the response's {num_tokens} tokens")
    return Score(rewards, ends)


def _numbers(name: str, values: object, kinds: str) -> np.ndarray:
    """Convert `values` to an array [turns]. `kinds` are the allowed kinds of numpy types."""
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, RuntimeError):  # a ragged list, a tensor with a gradient
        array = np.empty((), dtype=object)
    if array.ndim != 1 or (len(array) and array.dtype.kind not in kinds):
        wanted = "integers" if kinds == "iu" else "numbers"
        raise NoRewardError(f"{shorten(values)} as {name} of turns; a list of {wanted} is wanted")
    return array


def shorten(value: object) -> str:
    """Return a value as short text for an error message."""
    try:
        text = repr(value)  # escapes line breaks
    except Exception:  # noqa: BLE001 (code of the value's class, or an integer with many digits)
        text = f"({type(value).__name__})"
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "…"
