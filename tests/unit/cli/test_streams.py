"""Output that nobody reads, that no file takes, or whose encoding lacks our characters."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from gspo_megatron.cli import main as entry
from gspo_megatron.cli.streams import make_streams_safe


@pytest.fixture
def unread() -> Iterator[io.TextIOWrapper]:
    """A pipe whose reader has gone."""
    reader, writer = os.pipe()
    os.close(reader)
    stream = os.fdopen(writer, "w")
    yield stream
    with contextlib.suppress(BrokenPipeError):
        stream.close()


def command(monkeypatch: pytest.MonkeyPatch, *, raises: bool) -> None:
    def run(arguments: argparse.Namespace) -> int:
        print("a line")
        if raises:
            raise BrokenPipeError(32, "Broken pipe")
        return 1

    monkeypatch.setattr(entry, "parse", lambda argv: argparse.Namespace(run=run))


def test_a_reader_that_left_ends_the_command_without_a_traceback(
    unread: io.TextIOWrapper, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command(monkeypatch, raises=True)
    # not in the fixture: pytest sets its own stream again before the test itself
    monkeypatch.setattr(sys, "stdout", unread)
    assert entry.main([]) == 141
    unread.flush()  # as the interpreter does at its end
    assert capsys.readouterr().err == ""


def test_a_command_that_was_done_by_then_keeps_its_code(
    unread: io.TextIOWrapper, monkeypatch: pytest.MonkeyPatch
) -> None:
    command(monkeypatch, raises=False)
    monkeypatch.setattr(sys, "stdout", unread)
    assert entry.main([]) == 1
    unread.flush()


def test_a_broken_pipe_of_another_kind_is_shown_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command(monkeypatch, raises=True)
    assert entry.main([]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_closed_streams_take_no_number_of_a_file() -> None:
    program = (
        "import os, sys\n"
        "from gspo_megatron.cli.streams import make_streams_safe\n"
        "make_streams_safe()\n"
        "print('lost', flush=True)\n"
        "sys.exit(os.open(os.devnull, os.O_RDONLY) < 3)\n"
    )
    words = ["sh", "-c", '"$0" -c "$1" >&- 2>&-', sys.executable, program]
    assert subprocess.run(words, check=False, timeout=120).returncode == 0


def test_characters_that_the_encoding_lacks_are_spelled(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    make_streams_safe()
    print("r\u00fcns", flush=True)
    assert stream.buffer.getvalue() == b"r\\xfcns\n"  # type: ignore[attr-defined]
