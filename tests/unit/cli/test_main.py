"""The command line: the arguments that it accepts, and the exit code and message of
each mistake."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path
from unittest import mock

import psutil
import pytest

import gspo_megatron
from gspo_megatron.cli import report
from gspo_megatron.cli.main import parse
from gspo_megatron.errors import ConfigError
from gspo_megatron.process import sandbox
from tests.unit.cli.conftest import Command

ROOT = Path(gspo_megatron.__file__).parents[1]
GONE = "the current folder was removed; change to another one"
NO_PLACE = "No usable temporary directory found in ['/tmp', '/a']"  # of tempfile
NO_ROOM = f"{NO_PLACE}: none of these can be written and has room; name a folder in TMPDIR"


def test_overrides_may_stand_before_and_after_options_and_keep_their_order() -> None:
    words = ["train", "a.yaml", "training.steps=1", "--nproc", "2", "training.steps=2", "x.y=-1"]
    arguments = parse(words)
    assert arguments.config == "a.yaml"
    assert arguments.overrides == ["training.steps=1", "training.steps=2", "x.y=-1"]
    assert arguments.nproc == 2
    assert parse(["train", "--nproc", "3", "a.yaml"]).overrides == []
    pasted = "check a.yaml b.c=#1 # all mistakes, --before anything"  # as zsh passes it
    assert parse(pasted.split()).overrides == ["b.c=#1"]


def test_runs_of_a_report_may_follow_its_output() -> None:
    arguments = parse(["report", "one", "-o", "out", "two", "three"])
    assert (arguments.runs, arguments.output) == (["one", "two", "three"], "out")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["train", "a.yaml", "--nprocs", "2"], "unrecognized arguments: --nprocs"),
        (["train", "a.yaml", "--nproc", "0"], "'0' is not a positive integer"),
        (["train", "a.yaml", "--nproc", "two"], "'two' is not a positive integer"),
        (["train"], "required: CONFIG.yaml\n"),
        (["train", "a.yaml", "--only-make"], "--only-make: only with --from-step"),
        (["doctor", "now"], "unrecognized arguments: now"),
        (["report", "run", "other"], "a comparison of several runs needs -o/--output"),
        (["convert", "a.yaml"], "convert"),
        ([], "COMMAND"),
    ],
)
def test_malformed_command_lines_exit_with_2_and_say_why(
    words: list[str], told: str, gspo: Command
) -> None:
    code, _, err = gspo(*words)
    assert code == 2 and told in err


@pytest.mark.parametrize(
    "words", [["report", "-o", "out"], ["new", "out", "--model"], ["train", "--from-step=1"]]
)
def test_a_link_to_itself_is_told_in_one_line(
    tmp_path: Path, words: list[str], gspo: Command
) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    code, _, err = gspo(*words, str(loop))
    (line,) = err.splitlines()
    assert code == 2 and str(loop) in line


@pytest.mark.parametrize("module", ["gspo_megatron.cli.main", "gspo_megatron.process.launcher"])
def test_parsing_and_launching_import_nothing_heavy(module: str) -> None:
    heavy = "{'torch', 'megatron', 'pydantic', 'rich', 'numpy', 'transformers'}"
    script = f"import sys, {module}; sys.exit(', '.join({heavy} & set(sys.modules)) or 0)"
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize(
    ("error", "code", "first", "last"),
    [
        (ConfigError(["a.b = 1: wrong", "c.d = 2: too"]), 2, "a.b = 1: wrong", "c.d = 2: too"),
        (RuntimeError("on fire"), 1, "Traceback (most recent call last):", "RuntimeError: on fire"),
        (KeyboardInterrupt(), 130, "", ""),
        (OSError(errno.ENAMETOOLONG, "too long", "zz"), 2, "zz: too long", "zz: too long"),
        (OSError(errno.ELOOP, "links", "zz"), 2, "zz: links", "zz: links"),
        (OSError(errno.ENOENT, "of os.getcwd"), 2, GONE, GONE),
        (OSError(errno.ENOENT, NO_PLACE), 2, NO_ROOM, NO_ROOM),
    ],
)
def test_how_a_command_that_raises_ends(
    monkeypatch: pytest.MonkeyPatch,
    gspo: Command,
    error: BaseException,
    code: int,
    first: str,
    last: str,
) -> None:
    """A user's error ends the command with its message alone. Any other error ends the command with
    the traceback, in which the original cause comes last."""
    monkeypatch.setattr(report, "run", mock.Mock(side_effect=error))
    ended, out, err = gspo("report", "run", "-o", "out")
    lines = err.splitlines() or [""]
    assert (ended, out, lines[0], lines[-1]) == (code, "", first, last)


def test_report_prints_the_path_of_what_it_wrote(
    monkeypatch: pytest.MonkeyPatch, gspo: Command
) -> None:
    from gspo_megatron.observe import report as writer

    monkeypatch.setattr(writer, "write_report", lambda runs, out: Path(out, "-".join(runs)))
    for name in ("print_results", "print_comparison"):
        monkeypatch.setattr(writer, name, lambda runs: None)
    assert gspo("report", "one", "two", "-o", "out") == (0, "out/one-two\n", "")
    assert gspo("report", "one") == (0, "one/one\n", "")  # where training writes it, too


def test_without_docstrings_and_asserts_commands_and_checks_of_files_are_the_same(
    tmp_path: Path,
) -> None:
    """Under `python -OO`, the help of all commands and the check of a damaged checkpoint file stay
    the same."""
    (tmp_path / "optimizer.json").write_text('{"step": "3", "groups": []}')
    program = f"""
import pathlib, sys
from gspo_megatron.checkpoint.optimizer import GROUPS_FILE, read_groups
from gspo_megatron.cli.main import parse
from gspo_megatron.errors import DataError
folder = pathlib.Path({str(tmp_path)!r})
(folder / "optimizer.json").rename(folder / GROUPS_FILE)
try:
    read_groups(folder)
except DataError as error:
    print(error)
parse(["--help"])
"""
    words = [sys.executable, "-OO", "-c", program]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "not the groups of an optimizer" in done.stdout
    assert "generate some episodes" in done.stdout and "train a model" in done.stdout


# The first process of a container, in a command that has no handler of its own yet.
WAITS = """
import sys, time
from gspo_megatron.cli import main
def wait(_):
    print("waits", flush=True)
    time.sleep(60)
main._run = wait
sys.exit(main.main([]))
"""


def test_sigterm_ends_a_command_that_is_process_1() -> None:
    """The kernel drops signals to process 1 that it has no handler for."""
    bwrap = sandbox.find_bubblewrap()
    if bwrap is None or sandbox.fault() is not None:
        pytest.skip("no namespaces of processes")
    space = [bwrap, "--dev-bind", "/", "/", "--unshare-pid", "--proc", "/proc", "--as-pid-1"]
    words = [*space, "--die-with-parent", sys.executable, "-c", WAITS]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "waits\n"
            [first] = psutil.Process(process.pid).children()
            first.terminate()
            assert process.wait(20) == 143
        finally:
            process.kill()


def test_the_exit_codes_of_children_count_even_if_sigchld_is_ignored() -> None:
    """Some daemons ignore SIGCHLD, and all programs that they start inherit this."""
    program = """
import signal, subprocess, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
from gspo_megatron.cli import main
main._run = lambda _: subprocess.run([sys.executable, "-c", "raise SystemExit(3)"]).returncode
sys.exit(main.main([]))
"""
    words = [sys.executable, "-c", program]
    assert subprocess.run(words, cwd=ROOT, timeout=60, check=False).returncode == 3
