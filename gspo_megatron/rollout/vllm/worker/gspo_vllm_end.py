"""Ends a server without leftovers. The server and the process that started it use this module.

vLLM's temporary files (sockets, files for torch.distributed) are in a folder of the server's own.
The server's semaphores are in /dev/shm. Python's resource tracker, a process of the server's group,
removes the semaphores of killed processes, unless it is killed itself.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time

# The id of the process that started the server. Set only if the server has a session of its own.
STARTER_VARIABLE = "GSPO_SERVER_STARTER"
FOLDER_VARIABLE = "GSPO_SERVER_FOLDER"  # the server's own temporary folder
_TRACKER = b"multiprocessing.resource_tracker"
_TRACKER_SECONDS = 3.0
_LOOK_SECONDS = 0.02


def kill_group(group: int) -> None:
    """Kill all processes of a group. If this process belongs to the group, it is killed last."""
    if not os.path.isdir("/proc/self"):  # not Linux
        os.killpg(group, signal.SIGKILL)
        return
    deadline = time.monotonic() + _TRACKER_SECONDS
    while members := _members(group):
        for pid, is_tracker in members.items():
            if not is_tracker:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
        if all(members.values()) and os.getpgid(0) == group:
            break  # the trackers end when this process ends
        if time.monotonic() > deadline:
            os.killpg(group, signal.SIGKILL)
            break
        time.sleep(_LOOK_SECONDS)
    if os.getpgid(0) == group:
        os.kill(os.getpid(), signal.SIGKILL)


def has_ended(pid: int) -> bool:
    """Return whether a process has ended, even if its parent has not read its exit code yet."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in (b"Z", b"X")
    except OSError:
        return True


def remove_folder() -> None:
    """Remove the temporary folder of the server that this process belongs to."""
    if folder := os.environ.get(FOLDER_VARIABLE):
        shutil.rmtree(folder, ignore_errors=True)


def _members(group: int) -> dict[int, bool]:
    """Return, for each other running process of a group, whether it is a resource tracker."""
    found = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # the process has ended meanwhile
            with open(f"/proc/{name}/stat", "rb") as file:
                # pid (name) state parent group …
                state, _, its_group = file.read().rpartition(b")")[2].split()[:3]
            if int(its_group) == group and state not in b"ZX" and int(name) != os.getpid():
                with open(f"/proc/{name}/cmdline", "rb") as file:
                    found[int(name)] = _TRACKER in file.read()
    return found
