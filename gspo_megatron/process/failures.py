"""How a command ends: its exit code, and what it prints about an error.

A rank that our launcher started gives its error to the launcher instead of printing it: when one
rank fails, all others lose their connections, and only the launcher can tell which error is the
cause.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable
from typing import NamedTuple, TextIO

from gspo_megatron.errors import UserError, printable
from gspo_megatron.process import ranks

USER_ERROR = 2
DEFECT = 1
INTERRUPTED = 128 + signal.SIGINT
UNREAD = 128 + signal.SIGPIPE  # the reader of stdout is gone
LOST_PEER = 76  # EX_PROTOCOL: another rank is gone, and this rank has no other error
STOPPED = 75  # EX_TEMPFAIL: the run was stopped and saved; a batch script starts it again

# Errors for a file that the user may not read or write. A traceback would explain nothing.
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
# Messages of gloo, c10d's TCPStore and NCCL when another rank is gone.
_LOST_CONNECTION = re.compile(
    r"connection (was )?(closed|reset|refused|aborted|lost)|broken pipe|gloo/transport"
    r"|timed out|(wait|socket) ?timeout|failed to (recv|send)|(recv|send)(Value|Bytes|Vector)"
    r"|Dist(Network|Store|Backend)Error|nccl(Remote|System)Error|remote process exited"
    r"|communicator was aborted",
    re.IGNORECASE,
)


class Failure(NamedTuple):
    """A rank's report of its error: `text` is the whole report, `summary` is one line."""

    is_user_error: bool
    text: str
    summary: str


def exit_code_of(command: Callable[[], int]) -> int:
    """Run a command and return its exit code. After an error, return the exit code from
    `tell_failure`; after an interrupt, return INTERRUPTED.

    If stdout takes no output, the rest of the output is dropped. If the command has no other error,
    the exit code is then UNREAD if the reader of a pipe is gone. For other reasons, such as a full
    disk, the reason is printed, and the exit code is USER_ERROR. A stderr that takes no output does
    not change the exit code."""
    try:
        return _exit_code_of(command)
    finally:
        try:
            sys.stderr.flush()
        except OSError:
            _drop_output(sys.stderr)


def _exit_code_of(command: Callable[[], int]) -> int:
    code, error = 0, None
    try:
        code = command()
    except KeyboardInterrupt:
        code = INTERRUPTED
    except Exception as exception:
        error = exception
    stdout_error = _flush_stdout(error)
    if stdout_error is None or not (error is None or _is_same(error, stdout_error)):
        return code if error is None else tell_failure(error)
    if isinstance(stdout_error, BrokenPipeError):
        return code or UNREAD
    remedy = "the output is not complete: redirect it to another place"
    return code or tell_failure(UserError(f"stdout: {stdout_error.strerror}; {remedy}"))


def run_script(main: Callable[[], int | None]) -> int:
    """Run the function `main` of a script, and return its exit code, as `exit_code_of` does.

    A script opens files that its user names. So if the system refuses to open one of them, this is
    an error of the user."""

    def command() -> int:
        try:
            return main() or 0
        except OSError as error:
            if error.filename is None:
                raise
            raise UserError(f"{error.filename}: {error.strerror}") from error

    return exit_code_of(command)


def tell_failure(error: Exception) -> int:
    """Print an error, or give it to the launcher of this rank. Returns the exit code."""
    is_forbidden = isinstance(error, OSError) and error.errno in _FORBIDDEN
    if isinstance(error, UserError):
        text = printable(str(error))
        failure = Failure(True, text, text)
    elif is_forbidden and error.filename is not None:
        text = f"{error.filename}: {error.strerror}"
        failure = Failure(True, text, text)
    else:
        text = printable("".join(traceback.format_exception(error)).rstrip("\n"))
        summary = printable(f"{type(error).__name__}: {error}").splitlines()[0].rstrip(": ")
        failure = Failure(False, text, summary)
    if not _give_to_launcher(failure):
        with contextlib.suppress(OSError):  # nobody reads it
            print(failure.text, file=sys.stderr)
    if failure.is_user_error:
        return USER_ERROR
    is_one_of_many = int(os.environ.get("WORLD_SIZE", "1")) > 1
    return LOST_PEER if is_one_of_many and is_lost_connection(failure.text) else DEFECT


def _give_to_launcher(failure: Failure) -> bool:
    """Write a failure to the file of this rank's launcher. Returns False if there is no launcher,
    or if the disk of temporary files is full."""
    descriptor = ranks.failure_descriptor()
    if descriptor is None:
        return False
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(failure._asdict(), file)
    except OSError:
        return False
    return True


def parse_failure(text: str) -> Failure | None:
    """Return what `tell_failure` wrote, or None if the rank died before it had written the whole
    report."""
    try:
        return Failure(**json.loads(text))
    except (ValueError, TypeError):
        return None


def is_lost_connection(output: str) -> bool:
    """Whether a traceback ends in the kind of error that another rank's death causes."""
    _, _, last_traceback = output.rpartition("Traceback (most recent call last)")
    # Indented lines quote code, which may mention connections.
    lines = [line for line in last_traceback.splitlines() if not line[:1].isspace()]
    return _LOST_CONNECTION.search("\n".join(lines)) is not None


def make_streams_safe() -> None:
    """Make print() safe when stdout or stderr is closed or cannot encode a character, and open
    /dev/null in place of a closed stdin. Call this before files are opened. Otherwise a file would
    get the descriptor of the closed stream, and a child process would not inherit the file."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:  # closed, as by `>&-`
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper) and name != "stdin":
            stream.reconfigure(errors="backslashreplace")


def _flush_stdout(error: Exception | None) -> OSError | None:
    """Write the buffer of stdout. If stdout takes no output, drop the buffer and return the error
    of stdout. error: the error that ended the command."""
    try:
        if isinstance(error, OSError) and error.filename is None:
            # A stdout without a buffer has nothing left to flush. Another print shows whether it
            # still takes output.
            print()
        sys.stdout.flush()
    except OSError as stdout_error:
        _drop_output(sys.stdout)
        return stdout_error
    return None


def _drop_output(stream: TextIO) -> None:
    """Let a stream write to /dev/null. Otherwise the interpreter, which flushes the streams at its
    end, would report an error of stdout, and change the exit code to 120."""
    with contextlib.suppress(OSError):  # a stream without a descriptor
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def _is_same(error: Exception, other: OSError) -> bool:
    return isinstance(error, OSError) and (error.filename, error.errno) == (None, other.errno)
