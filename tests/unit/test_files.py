from __future__ import annotations

import hashlib
import os
import random
import resource
import shutil
from pathlib import Path

import pytest

from gspo_megatron.errors import DataError
from gspo_megatron.files import (
    fault_of_name,
    fingerprint,
    make_folder,
    parse_json,
    write_atomically,
    write_durably,
)


def test_writes_into_a_new_folder_and_replaces(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    assert write_atomically(path, b"one") == path
    write_atomically(path, b"two")
    assert path.read_bytes() == b"two"
    assert list(path.parent.iterdir()) == [path]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_atomically(tmp_path / "a", b"old")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(DataError, match="cannot be written: No space left on device"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_durable_write_that_fails_leaves_the_old_file_and_names_it(tmp_path: Path) -> None:
    """Python's own error names no file. Rank 0 would end with a traceback, for example in a
    rollback, and the other ranks would wait for it."""
    path = tmp_path / "latest"
    write_durably(path, b"old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (99, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large") as raised:
            write_durably(path, b"new" * 99)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert raised.value.filename == str(path) and path.read_bytes() == b"old"


def test_a_fingerprint_is_the_sha256_of_a_file(tmp_path: Path) -> None:
    content = random.Random(5).randbytes(5_000_001)  # more bytes than one read takes
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content)
    os.utime(path, (1, 1))
    assert fingerprint(path) == hashlib.sha256(content).hexdigest()
    assert fingerprint(shutil.copy(path, tmp_path / "other")) == fingerprint(path)
    with pytest.raises(DataError, match="absent: cannot be read"):
        fingerprint(tmp_path / "absent")


def test_the_fingerprint_of_a_folder_is_of_its_tokenizer_files(tmp_path: Path) -> None:
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


def test_the_fingerprint_of_rows_is_not_that_of_a_tokenizer_beside_them(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "rows.jsonl").write_text("1")
    of_tokenizer, of_rows = fingerprint(tmp_path), fingerprint(tmp_path, of_rows=True)
    (tmp_path / "rows.jsonl").write_text("2")
    assert fingerprint(tmp_path) == of_tokenizer != of_rows
    assert fingerprint(tmp_path, of_rows=True) not in (of_tokenizer, of_rows)
    (tmp_path / "rows.jsonl").unlink()
    assert fingerprint(tmp_path, of_rows=True) == of_tokenizer


@pytest.mark.parametrize("depth", [101, 5_000, 200_000])
@pytest.mark.parametrize("pair", ["[]", '{"a":}'])
def test_json_that_is_nested_too_deep_is_refused_as_all_that_is_no_json(
    depth: int, pair: str
) -> None:
    with pytest.raises(ValueError, match="nested more than 100 levels deep"):
        parse_json(pair[:-1] * depth + "0" + pair[-1] * depth)
    assert parse_json(pair[:-1] * 100 + "0" + pair[-1] * 100)


@pytest.mark.parametrize("content", [b"", b"[", b"\xff", b"\xff\xfe\x00\xd8", "9" * 5000])
def test_what_is_no_json_is_a_value_error(content: bytes | str) -> None:
    with pytest.raises(ValueError, match="."):
        parse_json(content)


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("a/b.distcp", None),
        ("é" * 127, None),
        ("é" * 128, "longer than 255 bytes"),
        ("a\0b", "NUL"),
        ("\ud800", "surrogate"),
        ("/etc/passwd", "not the name"),
        ("a/../../b", "not the name"),
        ("", "not the name"),
    ],
)
def test_names_that_no_file_below_a_folder_has(name: str, fault: str | None) -> None:
    found = fault_of_name(name)
    assert found is None if fault is None else fault in found


class Lag:
    """A client of a shared file system that does not see a new folder at first."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, looks: int) -> None:
        self.left, self._is_dir, self._folder = looks, Path.is_dir, folder
        monkeypatch.setattr(Path, "is_dir", lambda path, **more: self.is_dir(path, **more))
        monkeypatch.setattr("gspo_megatron.files._LAGS", (0.0, 0.0, 0.0))

    def is_dir(self, path: Path, **more: bool) -> bool:
        if path == self._folder and self.left > 0:
            self.left -= 1
            return False
        return self._is_dir(path, **more)


@pytest.mark.parametrize("looks", [1, 3])
def test_a_folder_that_another_node_made_a_moment_ago_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looks: int
) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    lag = Lag(monkeypatch, folder, looks)
    make_folder(folder)
    lag.left = looks
    write_atomically(folder / "b", b"c")
    assert (folder / "b").read_bytes() == b"c"


def test_a_file_in_the_place_of_a_folder_is_told_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gspo_megatron.files._LAGS", (100.0,))
    (tmp_path / "a").touch()
    with pytest.raises(FileExistsError):
        make_folder(tmp_path / "a")
    with pytest.raises(NotADirectoryError):
        make_folder(tmp_path / "a" / "b")
