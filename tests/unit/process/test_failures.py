"""The end of commands: the error that is reported as the cause, and output that cannot be
written."""

from __future__ import annotations

import argparse
import contextlib
import errno
import io
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from gspo_megatron.cli import main as entry
from gspo_megatron.cli.play import lines_of
from gspo_megatron.errors import RewardError
from gspo_megatron.process import failures, ranks

TRACEBACK = 'Traceback (most recent call last):\n  File "a.py", line 3, in f\n    g()\n'


@pytest.mark.parametrize(
    ("told", "is_lost"),
    [
        (
            "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed "
            "by peer [127.0.0.1]:41873",
            True,
        ),
        ("RuntimeError: [/gloo/transport/tcp/buffer.cc:72] Timed out waiting 1800000ms", True),
        ("RuntimeError: connection lost: rank 1 has ended", True),
        ("RuntimeError: timed out after 1800 s of waiting for rank 3", True),
        ("torch.distributed.DistNetworkError: failed to recv, got 0 bytes", True),
        (
            "torch.distributed.DistBackendError: NCCL error in: x.cpp:77, ncclRemoteError: A call "
            "failed possibly due to a network error or a remote process exiting prematurely.",
            True,
        ),
        ("ConnectionResetError: [Errno 104] Connection reset by peer", True),
        ("ValueError: shapes do not match", False),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", False),
        ("    pool.connection_closed()\nKeyError: 'connection'", False),
        # The last traceback decides which error is the cause.
        (f"ConnectionResetError: Connection reset by peer\n{TRACEBACK}ValueError: bad", False),
        (f"ValueError: bad\n{TRACEBACK}ConnectionResetError: Connection reset by peer\n", True),
    ],
)
def test_errors_of_a_lost_peer_are_told_from_others(told: str, is_lost: bool) -> None:
    assert failures.is_lost_connection(TRACEBACK + told) == is_lost


def test_a_script_names_the_file_that_it_cannot_open(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def reads() -> None:
        (tmp_path / "absent").read_text()

    def breaks() -> None:
        raise OSError(errno.EIO, "no file is the cause")

    assert failures.run_script(reads) == 2
    assert capsys.readouterr().err == f"{tmp_path}/absent: No such file or directory\n"
    assert failures.run_script(lambda: None) == 0
    assert failures.run_script(breaks) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_text_of_others_does_not_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    text = "the agent said: \x1b[2J\x1b]0;mine\x07\r\x9b1A\x7f\ttab\nline é"
    escaped = r"the agent said: \x1b[2J\x1b]0;mine\x07\r\x9b1A\x7f" + "\ttab\nline é\n"
    failures.tell_failure(RewardError(text))
    assert capsys.readouterr().err == escaped
    failures.tell_failure(KeyError(text))
    assert "\x1b" not in capsys.readouterr().err
    turn = {"role": "assistant", "text": text, "reward": None}
    record = {"row_id": "a:1", "turns": [turn], "reward": 1.0, "answer": None, "truncated": False}
    told = "\n".join(lines_of([{**record, "num_tokens": 3}]))
    assert r"assistant: the agent said: \x1b[2J\x1b]0;mine" in told and "\x1b" not in told


def test_a_launched_rank_hands_its_failure_over_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = RewardError("reward is NaN\non prompt 'é'")
    with tempfile.TemporaryFile() as file:
        # tell_failure closes the descriptor, so it gets a copy.
        monkeypatch.setattr(ranks, "_failure_descriptor", os.dup(file.fileno()))
        assert failures.tell_failure(error) == 2
        file.seek(0)
        failure = failures.parse_failure(file.read().decode())
    assert failure == failures.Failure(True, str(error), str(error))
    assert capsys.readouterr().err == ""
    assert failures.tell_failure(error) == 2
    assert capsys.readouterr().err == f"{error}\n"


def test_a_failure_that_fits_on_no_disk_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    monkeypatch.setattr(ranks, "_failure_descriptor", full)
    assert failures.tell_failure(RewardError("reward is NaN")) == 2
    assert capsys.readouterr().err == "reward is NaN\n"


@pytest.mark.parametrize("text", ["", '{"is_user_error": true, "te', "[]"])
def test_half_a_report_is_none(text: str) -> None:
    assert failures.parse_failure(text) is None


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EROFS])
def test_a_file_that_may_not_be_touched_is_named_without_a_traceback(
    number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert failures.tell_failure(OSError(number, os.strerror(number), "runs/a")) == 2
    assert capsys.readouterr().err == f"runs/a: {os.strerror(number)}\n"


def test_other_errors_of_the_system_are_shown_whole(capsys: pytest.CaptureFixture[str]) -> None:
    assert failures.tell_failure(OSError(errno.ENOSPC, "No space left", "runs/a")) == 1
    assert failures.tell_failure(OSError(errno.EPERM, "kill")) == 1
    told = capsys.readouterr().err
    assert "OSError: [Errno 28]" in told and "PermissionError: [Errno 1] kill" in told


def test_what_ends_a_command_decides_its_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert failures.exit_code_of(lambda: 3) == 3
    for error, code, told in (
        (KeyboardInterrupt(), 130, ""),
        (RewardError("bad reward"), 2, "bad reward\n"),
        (PermissionError(13, "Permission denied", "a.bin"), 2, "a.bin: Permission denied\n"),
    ):
        command = mock.Mock(side_effect=error)
        assert failures.exit_code_of(command) == code
        assert capsys.readouterr() == ("", told)
    assert failures.exit_code_of(mock.Mock(side_effect=RuntimeError("on fire"))) == 1
    assert capsys.readouterr().err.startswith("Traceback")


def test_a_rank_that_lost_another_one_says_so_by_its_exit_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lost = mock.Mock(side_effect=RuntimeError("[pair.cc:553] Connection closed by peer"))
    assert failures.exit_code_of(lost) == 1  # without WORLD_SIZE, there is only one rank
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert failures.exit_code_of(lost) == 76
    assert failures.exit_code_of(mock.Mock(side_effect=RuntimeError("on fire"))) == 1


@pytest.fixture
def unread() -> Iterator[io.TextIOWrapper]:
    """The writing end of a pipe whose reading end is closed."""
    reader, writer = os.pipe()
    os.close(reader)
    stream = os.fdopen(writer, "w")
    yield stream
    with contextlib.suppress(BrokenPipeError):
        stream.close()


def command(monkeypatch: pytest.MonkeyPatch, *, raises: bool, code: int = 0) -> None:
    def run(arguments: argparse.Namespace) -> int:
        print("a line")
        if raises:
            raise BrokenPipeError(32, "Broken pipe")
        return code

    monkeypatch.setattr(entry, "parse", lambda argv: argparse.Namespace(run=run))


@pytest.mark.parametrize(
    ("raises", "code", "ended"), [(True, 0, 141), (False, 0, 141), (False, 1, 1)]
)
def test_a_reader_that_left_ends_the_command_without_a_traceback(
    unread: io.TextIOWrapper,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    raises: bool,
    code: int,
    ended: int,
) -> None:
    """If the command had already failed with an error, it keeps the exit code of this error."""
    command(monkeypatch, raises=raises, code=code)
    # A fixture could not do this, because pytest sets its own stream before it calls the test.
    monkeypatch.setattr(sys, "stdout", unread)
    assert entry.main([]) == ended
    unread.flush()  # the interpreter does this when it ends
    assert capsys.readouterr().err == ""


# A command that saves a run although nobody reads its stderr any more, as `tee` after Ctrl-C.
_SAVES = """
import sys
from gspo_megatron.errors import RewardError
from gspo_megatron.process.failures import exit_code_of

def save():
    sys.stdin.read()
    try:
        print("saving", file=sys.stderr)
    except BrokenPipeError:
        pass
    if sys.argv[1] == "2":
        raise RewardError("the reward is wrong")
    return int(sys.argv[1])

sys.exit(exit_code_of(save))
"""


@pytest.mark.parametrize("code", [0, 2, 75])
def test_a_stderr_without_a_reader_does_not_change_the_exit_code(code: int) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _SAVES, str(code)], stdin=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdin is not None and process.stderr is not None
    process.stderr.close()
    process.stdin.close()
    assert process.wait(60) == code


def test_a_broken_pipe_of_another_kind_is_shown_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command(monkeypatch, raises=True)
    assert entry.main([]) == 1
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], ["check", "--keys", "clip"]),
        ([], ["check", "--keys"]),
        ([], ["--help"]),
        (["-u"], ["check", "--keys", "clip"]),
    ],
    ids=["short", "long", "help", "unbuffered"],
)
def test_a_full_disk_under_stdout_is_told_in_one_line(options: list[str], words: list[str]) -> None:
    """Short output is written only at the end of the command, long output while it runs, and
    without a buffer all output."""
    program = [sys.executable, *options, "-m", "gspo_megatron", *words]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            program, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120, check=False
        )
    told = (
        "stdout: No space left on device; the output is not complete: redirect it to another place"
    )
    assert (done.returncode, done.stderr) == (2, f"{told}\n")


def test_a_full_disk_of_another_file_is_shown_whole(capsys: pytest.CaptureFixture[str]) -> None:
    full = mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    assert failures.exit_code_of(full) == 1
    assert "Traceback" in capsys.readouterr().err


def test_closed_streams_take_no_number_of_a_file() -> None:
    program = (
        "import os, sys\n"
        "from gspo_megatron.process.failures import make_streams_safe\n"
        "make_streams_safe()\n"
        "print('lost', flush=True)\n"
        "sys.exit(os.open(os.devnull, os.O_RDONLY) < 3)\n"
    )
    words = ["sh", "-c", '"$0" -c "$1" >&- 2>&- <&-', sys.executable, program]
    assert subprocess.run(words, check=False, timeout=120).returncode == 0
    words[2] = words[2].replace(">&- 2>&-", "")
    assert subprocess.run(words, check=False, timeout=120).returncode == 0


def test_characters_that_the_encoding_lacks_are_spelled(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    failures.make_streams_safe()
    print("r\u00fcns", flush=True)
    assert stream.buffer.getvalue() == b"r\\xfcns\n"  # type: ignore[attr-defined]
