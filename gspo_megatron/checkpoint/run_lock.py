"""A lock on the run folder: two runs would overwrite each other's metrics and checkpoints."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gspo_megatron.errors import UserError

LOCK_FILE = ".lock"
_JOB = "Slurm job"
_PATIENCE = 5.0  # seconds in which the ranks of a killed run end
_TRIES = 100  # while other runs rename the folder


class RunLock:
    """A lock on run folders. A run's main rank holds it until `release` or its process ends."""

    def __init__(self) -> None:
        self._held: dict[tuple[int, int], int] = {}  # file descriptors by device and inode
        self._made: list[Path] = []  # folders

    def hold(self, folder: Path) -> None:
        """Make a folder, if it is missing, and lock it. A folder may be locked twice.

        Raises UserError that names the other run. On a file system without locks nothing is locked.
        After the loss of a node, a file server may keep its lock for minutes: the same Slurm job is
        let in when it is requeued.
        """
        for _ in range(_TRIES):
            if self._try(folder):
                return
        raise UserError(f"{folder}: is moved again and again while it is locked; try again")

    def _try(self, folder: Path) -> bool:
        """False where another run renamed the folder meanwhile."""
        path = folder / LOCK_FILE
        try:
            is_new = not folder.exists()
            folder.mkdir(parents=True, exist_ok=True)
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except FileNotFoundError:
            return False
        except OSError:
            return True  # the next write into the folder reports what is wrong
        known = _identity(os.fstat(file))
        if known in self._held:
            os.close(file)
            return True
        try:
            _lock(file)
        except BlockingIOError:
            holder = _parsed(os.read(file, 1000).decode(errors="replace"))
            os.close(file)
            if _JOB in holder and holder[_JOB] == _this_process().get(_JOB):
                return True
            name = ", ".join(f"{key} {value}" for key, value in holder.items()) or "unnamed"
            raise UserError(
                f"{folder}: another run is at work here ({name}); wait for its end, give another "
                f"logging.dir, or, if it has died with its node, remove {path}"
            ) from None
        except OSError:
            os.close(file)
            return True
        if not _is_at(path, known):
            os.close(file)
            return False
        self._held[known] = file
        if is_new:
            self._made.append(folder)
        with suppress(OSError):  # a full disk is reported by more important writes
            os.ftruncate(file, 0)
            os.pwrite(file, json.dumps(_this_process()).encode(), 0)
        return True

    def release(self) -> None:
        """Release all folders, and remove those that hold nothing but this lock."""
        for folder in self._made:
            path = folder / LOCK_FILE
            with suppress(OSError):
                if os.listdir(folder) == [LOCK_FILE] and _identity(path.stat()) in self._held:
                    path.unlink()  # a process that waits for the lock sees that the file is gone
                    folder.rmdir()
        self._made.clear()
        for file in self._held.values():
            os.close(file)
        self._held.clear()


@contextmanager
def run_lock() -> Iterator[RunLock]:
    """A lock that is released at the end."""
    lock = RunLock()
    try:
        yield lock
    finally:
        lock.release()


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _is_at(path: Path, known: tuple[int, int]) -> bool:
    with suppress(OSError):
        return _identity(path.stat()) == known
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
    job = os.environ.get("SLURM_JOB_ID")
    names = {"host": socket.gethostname(), "process": str(os.getpid())}
    return names if job is None else names | {_JOB: job}


def _parsed(holder: str) -> dict[str, str]:
    with suppress(ValueError):
        document = json.loads(holder)
        if isinstance(document, dict):
            return document
    return {}
