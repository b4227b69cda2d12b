"""Run a command, and end all its descendants with it: python subreaper.py COMMAND ARGUMENT ...

A daemon's grandchildren leave the daemon's process group and session, and get another parent.
Slurm's job steps do so, too. The process of this program is the subreaper (Linux, prctl(2)) of all
these processes, so they stay its descendants. It kills all descendants when the command ends, on
SIGTERM, or at the end of standard input, which shows that the process at the other end has died.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time

import psutil

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def kill_descendants() -> None:
    """Kill all descendants, including processes that start in the meantime."""
    while True:
        found = [p for p in psutil.Process().children(recursive=True) if not _has_ended(p)]
        if not found:
            return
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(0.01)


def _has_ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _reap_orphans(child: int) -> None:
    """Collect the exit codes of all processes that have ended, except `child`, whose exit code is
    needed."""
    with contextlib.suppress(ChildProcessError):
        while True:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None or ended.si_pid == child:
                return
            os.waitpid(ended.si_pid, os.WNOHANG)


def main(command: list[str]) -> int:
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    code = None
    while code is None:
        ready = select.select([reader, sys.stdin], [], [])[0]
        arrived = os.read(reader, 64) if reader in ready else b""
        if sys.stdin in ready or signal.SIGTERM in arrived or signal.SIGINT in arrived:
            break
        code = process.poll()
        _reap_orphans(process.pid)
    kill_descendants()
    return 0 if code is None else code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
