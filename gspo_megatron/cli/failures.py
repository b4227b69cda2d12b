"""What ends a command, and how a failure travels from the rank that had it to the person who reads
about it.

A rank that our launcher started hands its message to the launcher instead of printing it: when
one rank fails all others fail of broken connections, and only the launcher can tell which message
is worth reading.
"""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass

from gspo_megatron.cli import ranks
from gspo_megatron.cli.streams import drop_unread_output
from gspo_megatron.errors import UserError

USER_ERROR = 2
DEFECT = 1
INTERRUPTED = 128 + signal.SIGINT
UNREAD = 128 + signal.SIGPIPE
# A run that was told to stop, and is saved: sysexits.h's EX_TEMPFAIL, "try again". Whoever started
# it, a batch script for one, starts it again with the same command.
STOPPED = 75
# Nodes on which nothing should be trained: sysexits.h's EX_UNAVAILABLE.
UNFIT = 69

# What torch's stores and collectives say when a peer is gone: gloo, c10d's TCPStore, NCCL.
_LOST_CONNECTION = re.compile(
    r"connection (was )?(closed|reset|refused|aborted|lost)|broken pipe|gloo/transport"
    r"|timed out|(wait|socket) ?timeout|failed to (recv|send)|(recv|send)(Value|Bytes|Vector)"
    r"|Dist(Network|Store|Backend)Error|nccl(Remote|System)Error|remote process exited"
    r"|communicator was aborted",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Failure:
    """What a rank tells of its end: `text` is all of it, `summary` one line."""

    is_user_error: bool
    text: str
    summary: str


def exit_code_of(command: Callable[[], int], interrupted: str | None = None) -> int:
    """Run a command; returns its exit code, or that of what ended it, which is told: an error, or
    a reader that left in the middle. `interrupted` is said where the user ended it."""
    try:
        code = command()
    except KeyboardInterrupt:
        if interrupted is not None:
            print(interrupted, file=sys.stderr)
        return INTERRUPTED
    except Exception as error:  # told whole, or by its message
        if isinstance(error, BrokenPipeError) and drop_unread_output():
            return UNREAD
        return tell_failure(error)
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # the command has done its work all the same
        drop_unread_output()
    return code


def tell_failure(error: Exception) -> int:
    """Print an error, or hand it to the launcher of this rank; returns the exit code."""
    if isinstance(error, UserError):
        failure = Failure(True, str(error), str(error))
    elif _is_forbidden(error):
        assert isinstance(error, OSError)
        text = f"{error.filename}: {error.strerror}"
        failure = Failure(True, text, text)
    else:
        text = "".join(traceback.format_exception(error)).rstrip("\n")
        summary = f"{type(error).__name__}: {error}".splitlines()[0].rstrip(": ")
        failure = Failure(False, text, summary)
    descriptor = ranks.failure_descriptor()
    if descriptor is None:
        print(failure.text, file=sys.stderr)
    else:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(asdict(failure), file)
    return USER_ERROR if failure.is_user_error else DEFECT


def _is_forbidden(error: Exception) -> bool:
    """Whether the user may not read or write a file: nothing that a traceback could explain."""
    if not isinstance(error, OSError) or error.filename is None:
        return False
    return error.errno in (errno.EACCES, errno.EPERM, errno.EROFS)


def parse_failure(text: str) -> Failure | None:
    """What `tell_failure` wrote; None where the rank died before it had written it all."""
    try:
        return Failure(**json.loads(text))
    except (ValueError, TypeError):
        return None


def is_lost_connection(output: str) -> bool:
    """Whether a traceback ends in the kind of error that another rank's death causes."""
    _, _, last_traceback = output.rpartition("Traceback (most recent call last)")
    # Indented lines quote code, which may well speak of connections.
    told = [line for line in last_traceback.splitlines() if not line[:1].isspace()]
    return _LOST_CONNECTION.search("\n".join(told)) is not None
