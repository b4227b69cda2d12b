"""Whether an input file still holds what it held: a hash of its contents, not of its path."""

from __future__ import annotations

import hashlib
from pathlib import Path

from gspo_megatron.errors import DataError

_BLOCK = 1 << 22  # bytes read at a time
# What a Hugging Face tokenizer is read from; weights may lie in the same folder.
_TOKENIZER_FILES = ("*token*.json", "vocab*", "merges*", "*.model", "chat_template*", "config.json")


def fingerprint(path: str | Path) -> str:
    """SHA-256 of a file, or of the tokenizer files of a folder. Raises DataError."""
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
