"""Ends a process, and all that it has started, when its owner ends.

`keep` forks. The child continues. The parent becomes the keeper and runs no other code. The keeper
ends all descendants of the child, also those in other sessions, when the child has ended, when the
owner closes its end of a pipe, or when the owner dies for any reason. Linux only. Call `keep` first
in a fresh interpreter, because a fork copies no threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Sequence

SIGNALLED = 128  # if signal n ended the child, the keeper's exit code is this plus n

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_OWNER_DIED = signal.SIGRTMIN
_libc = ctypes.CDLL(None)  # not in `_prctl`: a process that was just forked must not load it


def command_under_keeper(lifeline: int, command: Sequence[str]) -> list[str]:
    """Return a command line that runs `command` under a keeper; see `keep`."""
    program = program_under_keeper(lifeline, "import os; os.execvp(sys.argv[1], sys.argv[1:])")
    return [sys.executable, "-c", program, *command]


def program_under_keeper(lifeline: int, then: str) -> str:
    """Return a program for `python -c` that calls `keep` and then runs the statements `then`."""
    # The program sets the paths first, because the current directory may have modules of the same
    # names.
    return (
        f"import sys; sys.path[:] = {sys.path!r}; "
        f"from gspo_megatron.process.keeper import keep; keep({lifeline}); {then}"
    )


def keep(lifeline: int) -> None:
    """Fork, and return only in the child. `lifeline` is the reading end of a pipe. When the pipe is
    closed, the keeper ends the child and all its descendants."""
    # Slurm and terminals send signals to whole jobs, but only the owner decides when this process
    # ends. So these signals get a handler that does nothing. The signals are not ignored, because
    # programs that the child starts would then ignore these signals, too. Programs do not inherit
    # handlers.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda *_: None)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # orphans become the keeper's children
    child = os.fork()
    if child == 0:
        end_with_parent()
        os.setpgid(0, 0)  # so kill(0, ...) in the child does not reach the keeper
        os.close(lifeline)
        return

    def end(*_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)

    def watch() -> None:
        os.read(lifeline, 1)
        end()

    # Another process that the owner has forked may hold the pipe open. Then only the signal shows
    # that the owner has died.
    signal.signal(_OWNER_DIED, end)
    end_with_parent(_OWNER_DIED)
    threading.Thread(target=watch, daemon=True).start()
    process, status = os.waitpid(-1, 0)
    while process != child:  # an orphan that has become the keeper's child
        process, status = os.waitpid(-1, 0)
    _end_descendants()
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else SIGNALLED - code)


def end_with_parent(number: int = signal.SIGKILL) -> None:
    """Let the kernel send this signal to this process when the thread that started it ends."""
    _prctl(_PR_SET_PDEATHSIG, number)


def _end_descendants() -> None:
    """End descendants until no descendant is left. Orphans become children of this process, which
    reaps them."""
    import psutil  # not at the top: the child does not need it

    me = psutil.Process()
    while True:
        with contextlib.suppress(psutil.Error):
            for process in me.children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    process.kill()
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _prctl(option: int, value: int) -> None:
    _libc.prctl(option, value, 0, 0, 0)
