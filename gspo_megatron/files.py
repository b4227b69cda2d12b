"""Writing files so that readers see all of a file or nothing, and hashes of their contents."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path, PurePosixPath
from typing import Any

from gspo_megatron.errors import DataError

# What code raises that takes a value from JSON for one of the wanted form.
WRONG_VALUES = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)

_MOST_NESTED = 100  # levels of a JSON text that a program of ours or a known one wrote
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
        make_folder(path.parent)
        try:
            with open(partial, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
                file.write(content)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise DataError(f"{path}: cannot be written: {error.strerror or error}") from error
    return path


def make_folder(folder: str | Path) -> None:
    """Make a folder and those above it; it may be there already. Raises OSError.

    On a shared file system (NFS, BeeGFS) another node may have made it a moment ago: making it
    fails then, although this node does not see a folder there yet.
    """
    folder = Path(folder)
    for seconds in (*_LAGS, None):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            return
        except (FileExistsError, FileNotFoundError):
            if seconds is None or folder.is_file():
                raise
        time.sleep(seconds)


_LAGS = (0.05, 0.2, 0.5, 1.0, 3.0)  # seconds; attributes in a cache of NFS may be older


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
    used memory on a virtual machine (docs/decisions, 0066). Raises OSError.
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


_SAMPLE, _SAMPLES = 1 << 16, 16  # bytes, and how many of them are read of a file of weights


def fingerprint_of_weights(folder: str | Path) -> str:
    """SHA-256 of a model's folder: of its small files whole, of each safetensors file the size, the
    beginning and samples from all of it. Reading all of a large model would take minutes, and two
    models that were trained apart differ everywhere. Raises DataError."""
    folder, digest = Path(folder), hashlib.sha256()
    try:
        for file in sorted(folder.glob("*.safetensors")):
            size = file.stat().st_size
            digest.update(f"{file.name}\0{size}\0".encode())
            with file.open("rb") as stream:
                for number in range(_SAMPLES):
                    stream.seek(number * size // _SAMPLES)
                    digest.update(stream.read(_SAMPLE))
        for name in ("config.json", "manifest.json"):  # a checkpoint's has checksums of all files
            if (folder / name).is_file():
                _add(digest, folder / name)
    except OSError as error:
        raise DataError(f"{folder}: cannot be read: {error.strerror or error}") from error
    return digest.hexdigest()


def _add(digest: hashlib._Hash, path: Path) -> None:
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)


def parse_json(content: bytes | str) -> Any:
    """The value of a JSON text from a file or a request. Raises ValueError, and nothing else, for
    what is none, is no UTF-8 or is nested so deep that code which walks through it would fail."""
    try:
        value = json.loads(content)
        level = [value]
        for _ in range(_MOST_NESTED + 1):
            inner = [each for each in level if isinstance(each, dict | list)]
            if not inner:
                return value
            level = [v for each in inner for v in (each.values() if type(each) is dict else each)]
    except RecursionError:
        pass
    raise ValueError(f"nested more than {_MOST_NESTED} levels deep")


def fault_of_name(name: str) -> str | None:
    """Why a name that a file lists cannot be that of a file below its folder; None: it can."""
    parts = PurePosixPath(name).parts
    try:
        encoded = os.fsencode(name)
    except UnicodeEncodeError:
        return "holds half a surrogate pair"
    if b"\0" in encoded:
        return "holds a NUL"
    if not parts or parts[0] == "/" or ".." in parts:
        return "is not the name of a file in this folder"
    if max(len(os.fsencode(part)) for part in parts) > _LONGEST_NAME:
        return f"is longer than {_LONGEST_NAME} bytes"
    return None


_LONGEST_NAME = 255  # bytes, of Linux's file systems


def sync_folders(top: Path) -> None:
    """Wait until all names in a folder and below it are on the disk. Raises OSError."""
    for folder in [top, *(path for path in top.rglob("*") if path.is_dir())]:
        sync(folder)
