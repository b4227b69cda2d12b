"""Errors that a user can correct.

A UserError ends a command with exit code 2 and its message, without a traceback. Any other
exception is a defect of this program or a failure of the machine, and is shown with its traceback.
"""

from __future__ import annotations

import contextlib
import difflib
import re
import sys
from collections.abc import Generator, Iterable, Sequence
from typing import Any, TextIO

_LONGEST_VALUE = 200  # characters; long enough for a path
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class UserError(ValueError):
    """Something that the user can correct is wrong: a config, a file, a reward function.

    `resume_when` ends the sentence "the same command continues it once ...", which is printed when
    this error has ended a run."""

    resume_when = "that is repaired"


class ConfigError(UserError):
    """All problems of a configuration, one line each.

    known: the configuration without the values that are not allowed, if its other values can still
    be checked (config/known.py).
    """

    def __init__(self, problems: Sequence[str], known: Any = None) -> None:
        assert problems, "a ConfigError without a problem"
        self.problems, self.known = list(problems), known
        super().__init__("\n".join(self.problems))


class UnknownValueError(ConfigError):
    """A check has read a value that is not allowed, so the check is impossible.

    The problem of the value is reported already, so this error has no line of its own."""

    def __init__(self) -> None:
        self.problems, self.known = [], None
        UserError.__init__(self)


class DataError(UserError):
    """A prompt file, tokenizer or other input file cannot be used as it is."""


class RolloutError(UserError):
    """The rollout servers do not fit the run, or are gone."""

    resume_when = "servers answer"


class ServersEndError(RolloutError):
    """A run that was told to stop waits for servers that were told to end, too."""


class RewardError(UserError):
    """A reward function raised an error, or returned something that is not a finite number."""

    resume_when = "the reward works"


class EpisodeError(UserError):
    """An environment raised an error, or broke a rule of episodes."""

    resume_when = "the environment works"


class UnplayableError(EpisodeError):
    """An environment cannot play any episode, whatever the policy does.

    It ends the run. Any other EpisodeError is the failure of one episode."""


def error_of(kind: str, text: str) -> UserError:
    """Make the UserError that another process raised, from its class name and message.

    A class that is not in this module becomes a plain UserError.
    """
    if kind == ConfigError.__name__:
        return ConfigError(text.splitlines())
    kinds = (DataError, RolloutError, ServersEndError, RewardError, EpisodeError, UnplayableError)
    return {each.__name__: each for each in kinds}.get(kind, UserError)(text)


def some_of(lines: Sequence[str], shown: int = 10) -> list[str]:
    """Return the first `shown` lines and the number of further lines, for very long lists."""
    more = len(lines) - shown
    return list(lines) if more <= 1 else [*lines[:shown], f"... and {more:,} more"]


@contextlib.contextmanager
def gathered_in(problems: list[str]) -> Generator[None]:
    """Catch a UserError in this context, and add its lines to the list."""
    try:
        yield
    except UserError as error:
        problems.extend(str(error).splitlines())


def problem(key: str, value: Any, wrong: str) -> str:
    """Make one line about a key. wrong: the problem and, after a semicolon, the allowed values."""
    return f"{key} = {format_value(value)}: {wrong}"


def format_value(value: Any) -> str:
    """Format a value as the user would write it, on one short line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(value)
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 3] + "..."


def printable(text: str) -> str:
    """Escape control characters other than line breaks and tabs, so that a text of a model, of a
    program or of a server cannot change what the terminal shows."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def tell(text: str, stream: TextIO | None = None) -> None:
    """Print a message of a run to a stream, by default stderr. If the reader of a pipe is gone or
    the disk of a log is full, the message is lost, and the run goes on."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr if stream is None else stream, flush=True)


def nearest(name: str, candidates: Iterable[str], count: int = 3) -> list[str]:
    """Return the candidates most similar to `name`, best first, or an empty list if none is similar
    enough."""
    by_folded = {candidate.lower(): candidate for candidate in candidates}
    found = difflib.get_close_matches(name.lower(), list(by_folded), n=count, cutoff=0.61)
    return [by_folded[folded] for folded in found]


def did_you_mean(names: Sequence[str]) -> str:
    """Return `did you mean a or b?` for at least one name."""
    return f"did you mean {' or '.join(names)}?"


def suggest(name: str, candidates: Sequence[str]) -> str:
    """Suggest the nearest candidates. If no candidate is near, list all candidates as allowed."""
    close = nearest(name, candidates)
    return did_you_mean(close) if close else f"allowed: {', '.join(candidates)}"
