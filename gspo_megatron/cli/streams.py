"""Standard output and error as they may come: closed, of an encoding without our characters, or a
pipe that nobody reads any more."""

from __future__ import annotations

import io
import os
import select
import sys


def make_streams_safe() -> None:
    """Let nothing that is printed raise for the stream's sake; to be called before files are
    opened, which would take the numbers of closed streams."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed, as `>&-` does it
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def drop_unread_output() -> bool:
    """Whether standard output is a pipe whose reader has gone, as in `check a.yaml | head -1`;
    what is still to be written to it is then dropped."""
    try:
        descriptor = sys.stdout.fileno()
    except OSError:
        return False
    poll = select.poll()
    poll.register(descriptor, 0)
    if not any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0)):
        return False
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)  # or the interpreter complains when it flushes at its end
    os.close(nowhere)
    return True
