"""A file's fingerprint is its contents' and nothing else's."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
from pathlib import Path

import pytest

from gspo_megatron.data.fingerprints import fingerprint
from gspo_megatron.errors import DataError


def test_of_a_file_it_is_the_sha256_of_its_bytes(tmp_path: Path) -> None:
    content = random.Random(5).randbytes(5_000_001)  # more than is read at a time
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content)
    os.utime(path, (1, 1))
    assert fingerprint(path) == hashlib.sha256(content).hexdigest()
    assert fingerprint(shutil.copy(path, tmp_path / "other")) == fingerprint(path)


def test_of_a_folder_only_what_a_tokenizer_is_read_from_counts(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    (folder / "vocab.txt").write_text("a b")
    before = fingerprint(folder)
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"weights")
    assert fingerprint(folder) == before
    (folder / "vocab.txt").write_text("a c")
    changed = fingerprint(folder)
    assert changed != before
    (folder / "vocab.txt").rename(folder / "vocab.json")
    assert fingerprint(folder) != changed


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="absent: cannot be read"):
        fingerprint(tmp_path / "absent")
