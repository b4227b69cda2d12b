"""Locks the run folder, because two runs would overwrite each other's metrics and checkpoints."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from gspo_megatron.errors import UserError
from gspo_megatron.files import WRONG_VALUES, make_folder, parse_json

LOCK_FILE = ".lock"
# Environment variables that a scheduler sets to the same value in all starts of a job -> (the words
# by which messages call the job, the variable that counts the starts of the job, or None if no
# variable counts them).
_JOBS = {
    "SLURM_JOB_ID": ("Slurm job", "SLURM_RESTART_COUNT"),
    "GSPO_JOB": ("job", None),  # set in deploy/kubernetes
    "SKYPILOT_TASK_ID": ("SkyPilot task", None),
}
_RESTART = "restart"
_PATIENCE = 5.0  # seconds to wait for the lock: the ranks of a killed run end in this time
_TRIES = 100  # attempts to lock a folder that other runs rename meanwhile


class RunLock:
    """A lock on run folders. A run's main rank holds it until it calls `release` or its process
    ends."""

    def __init__(self) -> None:
        self._held: list[int] = []  # descriptors of lock files
        self._made: list[Path] = []  # folders that this lock has made

    def hold(self, folder: Path) -> None:
        """Make a folder, if it is missing, and lock it. A folder may be locked twice.

        Raises UserError if another run holds the lock, and names that run. On a file system without
        locks nothing is locked. After the loss of a node, a file server may keep the node's lock
        for minutes. So if the scheduler starts the same job again, the new start may use the folder
        without the lock. Another step of the Slurm job that holds the lock may not use the folder.
        """
        for _ in range(_TRIES):
            if self._try(folder):
                return
        raise UserError(f"{folder}: another run moved it at each attempt to lock it; try again")

    def _try(self, folder: Path) -> bool:
        """Try once to lock a folder. Returns False if another run renamed the folder meanwhile."""
        path = folder / LOCK_FILE
        try:
            is_new = not folder.exists()
            make_folder(folder)
        except OSError:
            return True  # the next write into the folder reports what is wrong
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except FileNotFoundError:
            return False
        except OSError:
            return True  # as above
        if any(os.path.sameopenfile(file, held) for held in self._held):
            os.close(file)
            return True
        try:
            _lock(file)
        except BlockingIOError:
            holder: dict[str, str] = {}
            with suppress(*WRONG_VALUES):  # the other run may not have written its name yet
                holder = dict(parse_json(os.read(file, 1000)))
            os.close(file)
            if _is_later_start(_this_process(), holder):
                return True
            name = ", ".join(f"{key} {value}" for key, value in holder.items()) or "unnamed"
            raise UserError(
                f"{folder}: another run is at work here ({name}); wait for its end, give another "
                f"folder (logging.dir, --output), or, if that run's node has failed, remove {path}"
            ) from None
        except OSError:
            os.close(file)
            return True
        if not _is_at(path, file):
            os.close(file)
            return False
        self._held.append(file)
        if is_new:
            self._made.append(folder)
        with suppress(OSError):  # on a full disk, more important writes will report the error
            os.ftruncate(file, 0)
            os.pwrite(file, json.dumps(_this_process()).encode(), 0)
        return True

    def release(self) -> None:
        """Release all folders, and remove the folders that hold nothing but this lock."""
        for folder in self._made:
            path = folder / LOCK_FILE
            with suppress(OSError):
                is_held = any(_is_at(path, file) for file in self._held)
                if is_held and os.listdir(folder) == [LOCK_FILE]:
                    path.unlink()  # a process that waits for the lock sees that the file is gone
                    folder.rmdir()
        self._made.clear()
        for file in self._held:
            os.close(file)
        self._held.clear()

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _is_at(path: Path, file: int) -> bool:
    with suppress(OSError):
        return os.path.samestat(path.stat(), os.fstat(file))
    return False


def _lock(file: int) -> None:
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def _this_process() -> dict[str, str]:
    names = {"host": socket.gethostname(), "process": str(os.getpid())}
    for variable, (job, restart) in _JOBS.items():
        if value := os.environ.get(variable):
            counted = {} if restart is None else {_RESTART: os.environ.get(restart, "0")}
            return names | {job: value} | counted
    return names


def _is_later_start(process: Mapping[str, str], holder: Mapping[str, str]) -> bool:
    """Return whether a process belongs to a later start of the job that holds the lock. If so, the
    scheduler has ended the earlier start. If the scheduler does not count starts, any other process
    of the job belongs to a later start."""
    for job, restart in _JOBS.values():
        if job in holder and holder[job] == process.get(job):
            now, before = (each.get(_RESTART, "0") for each in (process, holder))
            return restart is None or (
                now.isdecimal() and before.isdecimal() and int(now) > int(before)
            )
    return False
