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


class RunLock:
    """A lock on run folders, held by this process until `release`, or until it has ended, however
    it ended. Only a run's main rank needs it."""

    def __init__(self) -> None:
        self._held: dict[tuple[int, int], int] = {}  # file descriptors by device and inode

    def hold(self, folder: Path) -> None:
        """Lock a folder, if it is there; harmless where this lock holds it already.

        Raises UserError that names the other run. On a file system without locks nothing is locked.
        After a lost node its file server may take minutes to see that a lock is nobody's: the same
        Slurm job, requeued, is let in.
        """
        if not folder.is_dir():
            return
        path = folder / LOCK_FILE
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError:
            return  # whoever writes there next says what is wrong with the folder
        status = os.fstat(file)
        if (status.st_dev, status.st_ino) in self._held:
            os.close(file)
            return
        try:
            _lock(file)
        except BlockingIOError:
            holder = os.read(file, 1000).decode(errors="replace")
            os.close(file)
            if _is_this_job(holder):
                return
            raise UserError(
                f"{folder}: another run is at work here ({_told(holder)}); wait for its end, give "
                f"another logging.dir, or, if it has died with its node, remove {path}"
            ) from None
        except OSError:
            os.close(file)
            return
        self._held[status.st_dev, status.st_ino] = file
        with suppress(OSError):  # a full disk is told where something of worth cannot be written
            os.ftruncate(file, 0)
            os.pwrite(file, json.dumps(_this_process()).encode(), 0)

    def release(self) -> None:
        """Give all folders free."""
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
