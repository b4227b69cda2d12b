"""Writing files that are either whole or absent."""

from __future__ import annotations

import os
from pathlib import Path

from gspo_megatron.errors import DataError


def write_atomically(path: str | Path, content: bytes) -> Path:
    """Writes `content` to `path`, making its folder; a reader never sees half of it.

    Raises DataError where the folder or the file cannot be written.
    """
    path = Path(path)
    # The process id keeps two writers apart; the same folder makes the replacement atomic.
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            partial.write_bytes(content)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise DataError(f"{path}: cannot be written: {error.strerror or error}") from error
    return path


def folder_lacks(folder: Path) -> str | None:
    """Why files can neither be written into `folder` nor it be made, in words; None: they can."""
    there = folder
    while not os.path.lexists(there):
        there = there.parent
    if not there.is_dir():
        return f"{there} is not a folder"
    if not os.access(there, os.W_OK | os.X_OK):
        read_only = os.statvfs(there).f_flag & os.ST_RDONLY
        return f"{there}: Read-only file system" if read_only else f"{there} may not be written"
    return None
