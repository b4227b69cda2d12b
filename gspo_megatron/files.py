"""Writing files so that readers see all of a file or nothing, and hashes of their contents."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from gspo_megatron.errors import DataError

SETTLED = 64 << 20  # bytes of a large file that are written before `settle` waits for the disk


def write_atomically(path: str | Path, content: bytes, mode: int = 0o666) -> Path:
    """Writes `content` to `path`, making its folder; a reader never sees half of it. `mode`: who
    may read and write it, less what the umask takes away.

    Raises DataError where the folder or the file cannot be written.
    """
    path = Path(path)
    # The process id keeps two writers apart; the same folder makes the replacement atomic.
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(partial, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
                file.write(content)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise DataError(f"{path}: cannot be written: {error.strerror or error}") from error
    return path


def sync(path: Path) -> None:
    """Wait until a file's contents, or the names in a folder, are on the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def settle(descriptor: int) -> None:
    """Wait until a file's contents are on the disk, and give their memory back.

    Called every SETTLED bytes while a large file is written: its pages are then used again for what
    follows. Without it a model fills the page cache, and fresh memory is several times slower than
    used memory on a virtual machine (docs/decisions.md). Raises OSError.
    """
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


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


_BLOCK = 1 << 22  # bytes read at a time
# The files that a Hugging Face tokenizer is read from; weights may be in the same folder.
_TOKENIZER_FILES = ("*token*.json", "vocab*", "merges*", "*.model", "chat_template*", "config.json")


def fingerprint(path: str | Path) -> str:
    """SHA-256 of a file's contents, or of the tokenizer files of a folder. Raises DataError."""
    path = Path(path)
    digest = hashlib.sha256()
    try:
        if not path.is_dir():
            _add(digest, path)
            return digest.hexdigest()
        files = {file for pattern in _TOKENIZER_FILES for file in path.glob(pattern)}
        for file in sorted(files):
            digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
            _add(digest, file)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    return digest.hexdigest()


def _add(digest: hashlib._Hash, path: Path) -> None:
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
