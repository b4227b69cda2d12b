"""One run at a time in a run folder: two would write over each other's metrics and checkpoints."""

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
_PATIENCE = 5.0  # seconds in which the ranks of a run that has been killed come to their end
_TRIES = 100  # of a folder that other runs move aside while it is being locked


class RunLock:
    """A lock on run folders, held by this process until `release`, or until it has ended, however
    it ended. Only a run's main rank needs it."""

    def __init__(self) -> None:
        self._held: dict[tuple[int, int], int] = {}  # file descriptors by device and inode
        self._made: list[Path] = []  # folders

    def hold(self, folder: Path) -> None:
        """Lock a folder, which is made where it is missing: of two new runs that begin at the same
        moment, one has it. Harmless where this lock holds it already.

        Raises UserError that names the other run. On a file system without locks nothing is locked.
        After a lost node its file server may take minutes to see that a lock is nobody's: the same
        Slurm job, requeued, is let in.
        """
        for _ in range(_TRIES):
            if self._is_settled(folder):
                return
        raise UserError(f"{folder}: is moved again and again while it is locked; try again")

    def _is_settled(self, folder: Path) -> bool:
        """False where another run moved the folder aside meanwhile, and its name is free again or
        means another one."""
        path = folder / LOCK_FILE
        try:
            is_new = not folder.exists()
            folder.mkdir(parents=True, exist_ok=True)
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except FileNotFoundError:
            return False
        except OSError:
            return True  # whoever writes there next says what is wrong with the folder
        known = _identity(os.fstat(file))
        if known in self._held:
            os.close(file)
            return True
        try:
            _lock(file)
        except BlockingIOError:
            holder = os.read(file, 1000).decode(errors="replace")
            os.close(file)
            if _is_this_job(holder):
                return True
            raise UserError(
                f"{folder}: another run is at work here ({_told(holder)}); wait for its end, give "
                f"another logging.dir, or, if it has died with its node, remove {path}"
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
        with suppress(OSError):  # a full disk is told where something of worth cannot be written
            os.ftruncate(file, 0)
            os.pwrite(file, json.dumps(_this_process()).encode(), 0)
        return True

    def release(self) -> None:
        """Give all folders free. Of a run that was refused nothing stays."""
        for folder in self._made:
            path = folder / LOCK_FILE
            with suppress(OSError):
                if os.listdir(folder) == [LOCK_FILE] and _identity(path.stat()) in self._held:
                    path.unlink()  # whoever waits for it sees that it is gone
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
    return {
        "host": socket.gethostname(),
        "process": str(os.getpid()),
        **({} if job is None else {"Slurm job": job}),
    }


def _is_this_job(holder: str) -> bool:
    job = os.environ.get("SLURM_JOB_ID")
    return job is not None and _parsed(holder).get("Slurm job") == job


def _told(holder: str) -> str:
    return ", ".join(f"{name} {value}" for name, value in _parsed(holder).items()) or "unnamed"


def _parsed(holder: str) -> dict[str, str]:
    with suppress(ValueError):
        document = json.loads(holder)
        if isinstance(document, dict):
            return document
    return {}
