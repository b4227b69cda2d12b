"""Names of signals, and Ctrl-C in a run that saves itself: the first Ctrl-C asks for a checkpoint,
the second one ends the run.

This file imports only the standard library, because the launcher imports it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Generator
from types import FrameType

# This variable is set for ranks that save the run at Ctrl-C. `train`, `pretrain` and `sft` start
# such ranks. Ranks that torchrun, srun or `ablate` has started just end at Ctrl-C.
SAVES = "GSPO_INTERRUPT_SAVES"
_TEXT = "interrupted: saving at the end of the step; press Ctrl-C again to end at once"


def signal_name(number: int) -> str:
    """Return a signal's name, or its number for a real-time signal, which has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@contextlib.contextmanager
def saved_at_interrupt(request: Callable[[], None], *, tells: bool) -> Generator[None]:
    """While the context lasts, let the first SIGINT call `request`, and the second SIGINT raise
    KeyboardInterrupt. If `tells` is set, the first SIGINT also prints a line. Does nothing without
    SAVES in the environment, outside the main thread, or if SIGINT is ignored or has another
    handler."""
    is_main_thread = threading.current_thread() is threading.main_thread()
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not (SAVES in os.environ and is_main_thread and is_default):
        yield
        return

    def first(_number: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        request()
        if tells:  # in a new thread, because this one may be inside a print
            printing = {"file": sys.stderr, "flush": True}
            threading.Thread(target=print, args=(_TEXT,), kwargs=printing).start()

    signal.signal(signal.SIGINT, first)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def end_signals() -> list[signal.Signals]:
    """Return the signals that ask a server or a run to end: SIGTERM, and SIGHUP of a closed
    terminal, unless it is ignored, as under nohup."""
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGTERM, *([] if is_ignored else [signal.SIGHUP])]


def heed_sigterm_as_process_1() -> None:
    """Let SIGTERM end this process if it is process 1, as the command of a container is. The kernel
    drops a signal to process 1 that has no handler. Without this function, a pod that is evicted
    while it waits or downloads would go on until the end of its grace period."""
    if os.getpid() == 1 and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        # All processes of the container end with process 1.
        signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))


def see_ends_of_children() -> None:
    """Let this process learn how its children end, even if the process that started it ignores
    SIGCHLD, as some daemons do. Otherwise the system drops the exit codes of children, and Python
    assumes 0 for a missing exit code."""
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
