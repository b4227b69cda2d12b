"""Errors that a user can mend.

Everything below ends a command with exit code 2 and its message alone, without a traceback; any
other exception is a defect of ours or a failure of the machine, and is shown whole.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Generator, Iterable, Sequence
from typing import Any

_LONGEST_VALUE = 200  # characters; a path should be whole


class UserError(ValueError):
    """Something in the user's hands is wrong: a config, a file, a reward function.

    `resume_when` ends the sentence "the same command continues it once ..." of a run that this
    error has ended."""

    resume_when = "that is mended"


class ConfigError(UserError):
    """All that is wrong with a configuration, one line a problem.

    known: the configuration without the values that are not allowed, where the rest of it can still
    be checked (config/known.py).
    """

    def __init__(self, problems: Sequence[str], known: Any = None) -> None:
        assert problems, "a ConfigError without a problem"
        self.problems, self.known = list(problems), known
        super().__init__("\n".join(self.problems))


class UnknownValueError(ConfigError):
    """A value was read that is not allowed, which is told already: what needs it cannot be checked.
    It has no line of its own."""

    def __init__(self) -> None:
        self.problems, self.known = [], None
        UserError.__init__(self)


class DataError(UserError):
    """A prompt file, tokenizer or other input file cannot be used as it is."""


class RolloutError(UserError):
    """The servers that draw responses: not as the run needs them, or gone."""

    resume_when = "servers answer"


class RewardError(UserError):
    """A reward function raised or returned something that is not a finite number."""

    resume_when = "the reward works"


class EpisodeError(UserError):
    """An environment raised, or did not keep to what an episode allows."""

    resume_when = "the environment works"


class UnplayableError(EpisodeError):
    """An environment cannot play any episode, whatever the policy does: it ends the run, where an
    EpisodeError is the failure of one episode."""


def error_of(kind: str, text: str) -> UserError:
    """The UserError that another process has raised, by the name of its class and its message. A
    class that is not of this module becomes a plain UserError."""
    if kind == ConfigError.__name__:
        return ConfigError(text.splitlines())
    kinds = (DataError, RolloutError, RewardError, EpisodeError, UnplayableError)
    return {each.__name__: each for each in kinds}.get(kind, UserError)(text)


def some_of(lines: Sequence[str], shown: int = 10) -> list[str]:
    """The first `shown` lines and how many more there are: a model has thousands of tensors."""
    more = len(lines) - shown
    return list(lines) if more <= 1 else [*lines[:shown], f"... and {more:,} more"]


@contextlib.contextmanager
def gathered_in(problems: list[str]) -> Generator[None]:
    """Add what is wrong inside to the list, line by line."""
    try:
        yield
    except UserError as error:
        problems.extend(str(error).splitlines())


def problem(key: str, value: Any, wrong: str) -> str:
    """One line about one key; `wrong` says what is wrong and, after a semicolon, what is
    allowed."""
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
    return did_you_mean(close) if close else f"allowed: {', '.join(candidates)}"
