"""Atomic or durable writing of files, hashes of their contents, and checked JSON."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import time
from collections.abc import Callable, Generator
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from gspo_megatron.errors import DataError

T = TypeVar("T")

# Exceptions that code raises if it reads a JSON value with another structure than it expects.
WRONG_VALUES = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)

SINGLE_FILE = "model.safetensors"
WEIGHT_INDEX = "model.safetensors.index.json"
# The files that are copied together with weights: settings and tokenizer, but never code.
SIDE_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "chat_template.jinja",
    "chat_template.json",
)

_MOST_NESTED = 100  # levels; no file of this package or of a known program is nested so deep
SETTLED = 64 << 20  # bytes that a writer of a large file writes between two calls of `settle`


@contextlib.contextmanager
def os_errors(path: str | Path, wrong: str) -> Generator[None]:
    """Turn an OSError in this context into a DataError, `PATH: WRONG: the system's reason`."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{path}: {wrong}: {error.strerror or error}") from error


def write_atomically(path: str | Path, content: bytes, mode: int = 0o666) -> Path:
    """Write `content` to `path`, making its folder; a reader never sees a part of it.

    mode: the file's permissions before the umask. Raises DataError if the folder or the file cannot
    be written.
    """
    path = Path(path)
    # Two writers have different files, also on two machines with the same process id. The partial
    # file is in the same folder as `path`, so that the replacement is atomic.
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    with os_errors(path, "cannot be written"):
        make_folder(path.parent)
        try:
            with open(partial, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
                file.write(content)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
    return path


PARTIAL = ".partial-"  # the names of files and folders that are not complete begin with this
REPLACED = ".replaced-"  # and those of whole checkpoints, until another one has taken their place


def write_durably(path: Path, content: bytes) -> None:
    """Write `content` to `path`. After a loss of power, the file has either its old or its new
    contents. A killed process may leave the file `.partial-NAME`. Raises OSError, which names a
    file."""
    partial = path.with_name(f"{PARTIAL}{path.name}")
    try:
        partial.write_bytes(content)
        sync(partial)
        partial.replace(path)
        sync(path.parent)
    except OSError as error:
        if error.filename is None:  # on a full disk
            error.filename = str(path)
        raise


def make_folder(folder: str | Path) -> None:
    """Make a folder and its parents; it may exist already. Raises OSError.

    On a shared file system (NFS, BeeGFS) another node may have made the folder a moment ago. Then
    mkdir fails although this node does not see the folder yet, so this function tries again.
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


_LAGS = (0.05, 0.2, 0.5, 1.0, 3.0)  # seconds between tries; within this time NFS updates its cache


def named(path: Path) -> Path:
    """Return the same path with a name at its end, for `with_name`: `.` and `..` have none."""
    return path if path.name not in ("", "..") else path.resolve()


def unused_name(path: Path, mark: str, number: int) -> Path:
    """Return a path beside `path` that does not exist yet: its name with a mark and a number, which
    is at least `number`."""
    path = named(path)
    while (free := path.with_name(f"{path.name}{mark}{number}")).exists():
        number += 1
    return free


def sync(path: Path) -> None:
    """Wait until a file's contents, or the names in a folder, are on disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def settle(descriptor: int) -> None:
    """Wait until a file's contents are on disk, and free their pages in the page cache.

    A writer of a large file calls this every SETTLED bytes, so that the system reuses the pages.
    Otherwise the files of a model fill the page cache, and on a virtual machine new memory is
    several times slower than reused memory (docs/decisions, 0066). Raises OSError.
    """
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def copied_as(file: Path) -> Path:
    """Return a file that is copied from a folder of somebody else. Raises DataError if it is a link
    to a file of another name outside of the folder (and not to a blob of the Hub's cache), which
    would publish any file of the user."""
    target = file.resolve()
    is_inside = target.is_relative_to(file.parent.resolve())
    if not (is_inside or target.name == file.name or target.parent.name == "blobs"):
        raise DataError(f"{file}: a link to {target}; replace it by a copy of the file")
    return file


def folder_lacks(folder: Path) -> str | None:
    """Return in words why files cannot be written into `folder`, or None if they can.

    The folder need not exist if it can be made.
    """
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
# The files of a Hugging Face tokenizer. The folder may also hold weights.
_TOKENIZER_FILES = ("*token*.json", "vocab*", "merges*", "*.model", "chat_template*", "config.json")

_ROW_FILES = ("*.jsonl", "*.parquet")


def fingerprint(path: str | Path, *, of_rows: bool = False) -> str:
    """Return the SHA-256 of a file, or of the tokenizer files in a folder; with `of_rows`, of the
    .jsonl and .parquet files in it. A folder without such files counts as one of the other kind.
    Raises DataError."""
    path = Path(path)
    digest = hashlib.sha256()
    with os_errors(path, "cannot be read"):
        if not path.is_dir():
            _add(digest, path)
            return digest.hexdigest()
        kinds = (_ROW_FILES, _TOKENIZER_FILES) if of_rows else (_TOKENIZER_FILES, _ROW_FILES)
        found = ({file for pattern in kind for file in path.glob(pattern)} for kind in kinds)
        for file in sorted(next(filter(None, found), ())):
            digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
            _add(digest, file)
    return digest.hexdigest()


_SAMPLE, _SAMPLES = 1 << 16, 16  # bytes of a sample, and the number of samples of each file


def fingerprint_of_weights(folder: str | Path) -> str:
    """Return the SHA-256 of a model's folder. Raises DataError.

    The hash covers small files as a whole. Of a safetensors file, the hash covers only the size and
    16 samples, spread over the file. Reading a whole large model would take minutes. The samples
    are enough, because two separately trained models differ everywhere.
    """
    folder, digest = Path(folder), hashlib.sha256()
    with os_errors(folder, "cannot be read"):
        for file in sorted(folder.glob("*.safetensors")):
            size = file.stat().st_size
            digest.update(f"{file.name}\0{size}\0".encode())
            with file.open("rb") as stream:
                for number in range(_SAMPLES):
                    stream.seek(number * size // _SAMPLES)
                    digest.update(stream.read(_SAMPLE))
        for name in ("config.json", "manifest.json"):  # the manifest has checksums of all files
            if (folder / name).is_file():
                _add(digest, folder / name)
    return digest.hexdigest()


def _add(digest: hashlib._Hash, path: Path) -> None:
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)


def parse_json(
    content: bytes | str, make_object: Callable[[list[tuple[str, Any]]], Any] | None = None
) -> Any:
    """Return the value of a JSON text from a file or a request.

    make_object: makes a JSON object from its keys and values; None: a dictionary.

    Raises only ValueError: if the text is not JSON or not UTF-8, or if it is nested so deep that
    recursive code would fail.
    """
    try:
        value = json.loads(content, object_pairs_hook=make_object)
        level = [value]
        for _ in range(_MOST_NESTED + 1):
            inner = [each for each in level if isinstance(each, dict | list)]
            if not inner:
                return value
            level = [v for each in inner for v in (each.values() if type(each) is dict else each)]
    except RecursionError:
        pass
    raise ValueError(f"nested more than {_MOST_NESTED} levels deep")


def object_in(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Returns {} if the file is missing or damaged: this function
    is for readers of a file whose faults other code reports."""
    try:
        found = parse_json(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def read_record(path: Path, kind: Callable[..., T], what: str) -> T | None:
    """Return the JSON object in a file as `kind`, a data class; None if there is no such file.

    Raises DataError if the file cannot be read, or is not the record of `what`.
    """
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    try:
        return kind(**parse_json(content))
    except WRONG_VALUES as error:
        raise DataError(f"{path}: not the record of {what}") from error


def fault_of_name(name: str) -> str | None:
    """Return why a name from a list of files cannot be the name of a file below a folder, or None
    if it can."""
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


_LONGEST_NAME = 255  # bytes; the limit of Linux's file systems


def sync_folders(top: Path) -> None:
    """Wait until all names in a folder and below it are on disk. Raises OSError."""
    for folder in [top, *(path for path in top.rglob("*") if path.is_dir())]:
        sync(folder)
