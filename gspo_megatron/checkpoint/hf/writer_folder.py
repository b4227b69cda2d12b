"""A folder that appears under its name whole or not at all."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from gspo_megatron.checkpoint.folder import sync_file, sync_folder
from gspo_megatron.errors import DataError
from gspo_megatron.files import folder_lacks

_MENDABLE = (
    errno.EACCES,
    errno.EDQUOT,
    errno.EEXIST,
    errno.EFBIG,
    errno.ENAMETOOLONG,
    errno.ENOSPC,
    errno.ENOTDIR,
    errno.EPERM,
    errno.EROFS,
)
_SECONDS_BETWEEN_SYNCS = 0.1


class NewFolder:
    """A context manager: within it, `partial` is a hidden folder beside `path`; `publish` gives it
    that name. Left without that, it is removed; what a killed process left there is replaced.

    Raises DataError where `path` has something in it already, cannot be written, is being written
    by another process, or where the disk has less than `size` bytes free.
    """

    def __init__(self, path: str | Path, size: int) -> None:
        self.path = Path(path)
        self.partial = hidden_place(self.path)
        self._size = size
        self._lock: int | None = None
        self._published = False

    def __enter__(self) -> NewFolder:
        check_destination(self.path)
        with told(self.path):
            self.partial.parent.mkdir(parents=True, exist_ok=True)
            self._remove_leftovers()
            free = shutil.disk_usage(self.partial.parent).free
            if self._size > free:
                raise DataError(f"{self.path}: {self._size:,} bytes to write, {free:,} are free")
            self.partial.mkdir()
            self._lock = _lock(self.partial)
        return self

    def publish(self) -> None:
        """Make the names in it durable (files are synced already) and show it."""
        with told(self.path):
            for folder in [*(p for p in self.partial.rglob("*") if p.is_dir()), self.partial]:
                sync_folder(folder)
            self.partial.rename(os.path.abspath(self.path))
            self._published = True
            sync_folder(self.partial.parent)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._lock is None:
            return
        if not self._published:
            shutil.rmtree(self.partial, ignore_errors=True)
        os.close(self._lock)
        self._lock = None

    def _remove_leftovers(self) -> None:
        """Of a process that was killed; one that lives keeps its folder locked."""
        if not self.partial.exists():
            return
        lock = _lock(self.partial)
        if lock is None:
            raise DataError(f"{self.path}: another process is writing to it")
        os.close(lock)
        shutil.rmtree(self.partial)


def hidden_place(path: Path) -> Path:
    """Where a folder is made."""
    absolute = Path(os.path.abspath(path))  # a name such as "." has no place beside it
    return absolute.parent / f".{absolute.name}.partial"


def check_destination(path: Path) -> None:
    """Raise DataError unless `path` is new or an empty folder, where folders can be made."""
    if path.is_dir():
        if any(path.iterdir()):
            raise DataError(f"{path}: has files in it already; give a new or an empty folder")
    elif path.exists() or path.is_symlink():
        raise DataError(f"{path}: exists and is not a folder")
    lacks = folder_lacks(hidden_place(path).parent)
    if lacks is not None:
        raise DataError(f"{path}: cannot be made: {lacks}")


@contextmanager
def told(path: Path) -> Iterator[None]:
    """What the user can mend about the place to write to: one line of it."""
    try:
        yield
    except OSError as error:
        if error.errno not in _MENDABLE:
            raise
        raise DataError(f"{path}: cannot be written: {error.strerror}") from error


@contextmanager
def kept_on_disk(folder: Path, path: Path) -> Iterator[None]:
    """Within it, the disk writes what the files of a folder get, again and again, so that little is
    left to wait for; on leaving it, all of it is on the disk. What the user can mend is told of
    `path`, else raises OSError."""
    stop, failed = threading.Event(), threading.Event()

    def work() -> None:
        last = False
        while not last:
            last = stop.wait(_SECONDS_BETWEEN_SYNCS)
            for path in folder.iterdir() if not failed.is_set() else ():
                sync_file(path)

    with ThreadPoolExecutor(1) as other:
        working = other.submit(work)
        try:
            yield
        except BaseException:
            failed.set()
            raise
        finally:
            stop.set()
    with told(path):
        working.result()


def write_file(path: Path, content: str) -> None:
    """Write a text and wait until it is on the disk."""
    path.write_text(content, encoding="utf-8")
    sync_file(path)


def copy_file(source: Path, folder: Path) -> None:
    """Copy a file's contents into a folder, and wait until they are on the disk."""
    shutil.copyfile(source, folder / source.name)
    sync_file(folder / source.name)


def _lock(folder: Path) -> int | None:
    """A descriptor that holds the folder until it is closed; None where another process does."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor
