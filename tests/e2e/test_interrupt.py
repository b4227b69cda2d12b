"""A run in a terminal. The first Ctrl-C saves the run, and the second one ends it immediately. The
end of the terminal saves the run, too."""

from __future__ import annotations

import os
import pty
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import yaml

from tests.e2e.conftest import write_config
from tests.e2e.resuming import (
    TINY_MODEL,
    checkpoint_names,
    command,
    environment,
    make_small,
    records,
)
from tests.forks import can_fork, start
from tests.programs import wait_until

STEPS = 3
SAVING = "interrupted: saving at the end of the step; press Ctrl-C again to end at once"
ONE, TWO = (), ("parallel.layout=dp=2",)

# While the file `hold` exists, rank 0 waits in the first call of the second step. While
# `hold_start` exists, each rank waits when it starts.
REWARD = """
import os, time, zlib
from pathlib import Path
folder, calls = Path(__file__).parent, 0
rank = os.environ.get("RANK")
def hold(name):
    while (folder / name).exists():
        (folder / f"{name}-{rank}").touch()
        time.sleep(0.01)
if rank:
    hold("hold_start")
def reward(sample):
    global calls
    calls += 1
    if calls > (8 + 16) / int(os.environ.get("WORLD_SIZE", "1")) and rank in (None, "0"):
        hold("hold")
    return zlib.crc32(repr((sample.prompt, sample.response)).encode()) % 97 / 96
"""


class Terminal:
    """A terminal in which one command runs."""

    def __init__(self, words: list[str], environ: dict[str, str]) -> None:
        self._keys, screen = pty.openpty()
        assert can_fork(words, environ)
        self.process = start(words, environ, None, [screen] * 3)
        os.close(screen)
        self.output, self._is_closed = b"", False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        try:
            while not self._is_closed and (part := os.read(self._keys, 4096)):
                self.output += part
        except OSError:  # the last program has closed the terminal
            pass

    def close(self) -> None:
        """Close the terminal, as the end of a connection by ssh does."""
        self._is_closed = True
        os.write(self._keys, b" ")  # its echo wakes the reader
        self._reader.join(timeout=60)
        os.close(self._keys)

    def press_ctrl_c(self) -> None:
        os.write(self._keys, b"\x03")

    def shows(self, text: str) -> bool:
        return text in self.output.decode(errors="replace")

    def await_text(self, text: str) -> None:
        assert wait_until(lambda: self.shows(text), self.process), self.output.decode()

    def end(self, expect: int) -> list[str]:
        """Wait until the command has ended, and check that it left no child. Returns the lines on
        the screen."""
        code = self.process.wait(timeout=120)
        self._reader.join(timeout=60)
        text = self.output.decode(errors="replace")
        assert code == expect, text
        return re.sub(r"\^C|\x1b\[\?25h", "", text).splitlines()


Start = Callable[..., Terminal]


@pytest.fixture(name="start")
def start_fixture(tmp_path: Path) -> Iterator[Start]:
    """A function that starts `train` in a terminal. After the test, none of its processes may be
    left."""
    terminals: list[Terminal] = []

    def begin(words: list[str], path: Path, kind: str = "dumb") -> Terminal:
        environ = {**environment(path), "TERM": kind, "COLUMNS": "200"}
        terminals.append(Terminal(words, environ))
        return terminals[-1]

    def left() -> list[psutil.Process]:
        """The processes that have an argument with a path in the test's folder."""
        found = psutil.process_iter(["cmdline", "status"])
        mine = [p for p in found if str(tmp_path) in " ".join(p.info["cmdline"] or ())]
        return [p for p in mine if p.info["status"] != psutil.STATUS_ZOMBIE]

    yield begin
    ended = all(terminal.process.poll() is not None for terminal in terminals)
    survivors = left()
    for process in survivors:
        process.kill()
    assert not ended or not survivors


@pytest.fixture
def config(toy: Path, tmp_path: Path) -> Path:
    path = make_small(write_config(toy, tmp_path), training={"steps": STEPS})
    (tmp_path / "resuming_reward.py").write_text(REWARD)
    return path


@pytest.fixture
def held(config: Path, start: Start) -> Callable[..., Terminal]:
    """A function that starts a run and waits until the run is held in the rollout of its second
    step."""

    def begin(*words: str, kind: str = "dumb", what: str = "train") -> Terminal:
        (config.parent / "hold").touch()
        terminal = start(command(config, *words, what=what), config, kind)
        found = lambda: list(config.parent.glob("hold-*"))  # noqa: E731
        assert wait_until(found, terminal.process), terminal.output.decode()
        return terminal

    return begin


@pytest.mark.parametrize("words", [ONE, TWO])
def test_the_first_saves_the_run(
    config: Path, held: Callable[..., Terminal], words: tuple[str, ...]
) -> None:
    terminal = held(*words)
    terminal.press_ctrl_c()
    terminal.await_text(SAVING)
    (config.parent / "hold").unlink()
    lines = terminal.end(75)
    assert lines.count(SAVING) == 1
    assert lines[-1].startswith("stopped as asked") and "the same command resumes" in lines[-1]
    assert "rl_00000001_rollouts" in checkpoint_names(config.parent / "run")


@pytest.mark.parametrize("words", [ONE, TWO])
def test_the_end_of_the_terminal_saves_the_run(
    config: Path, held: Callable[..., Terminal], words: tuple[str, ...]
) -> None:
    terminal = held(*words)
    terminal.close()
    time.sleep(0.5)
    terminal.process.send_signal(signal.SIGHUP)  # as a shell does for its jobs
    time.sleep(0.5)
    (config.parent / "hold").unlink()
    terminal.end(75)
    assert "rl_00000001_rollouts" in checkpoint_names(config.parent / "run")


@pytest.mark.parametrize(("words", "kind"), [(ONE, "xterm"), (TWO, "dumb")])
def test_the_second_ends_the_run_at_once(
    config: Path, held: Callable[..., Terminal], words: tuple[str, ...], kind: str
) -> None:
    """One kind of terminal shows a progress bar. The line above it stays whole."""
    terminal = held(*words, kind=kind)
    terminal.press_ctrl_c()
    terminal.await_text(SAVING)
    terminal.press_ctrl_c()  # the run is still held, so the step has not ended
    last = terminal.end(130)[-1]
    assert last == "interrupted: the same command resumes the run from rl_00000001"
    assert checkpoint_names(config.parent / "run") == ["latest", "rl_00000001"]
    shown, hidden = (terminal.output.rfind(code) for code in (b"\x1b[?25h", b"\x1b[?25l"))
    assert shown > hidden or kind == "dumb"  # the cursor is shown again


def test_a_run_that_saves_nothing_ends_at_once_and_says_so(held: Callable[..., Terminal]) -> None:
    terminal = held(*TWO, "checkpoint.interval=0")
    terminal.press_ctrl_c()
    lines = terminal.end(130)
    assert lines[-1] == "interrupted: nothing was saved, because checkpoint.interval = 0"
    assert SAVING not in lines


def test_at_the_start_of_the_ranks_the_first_ends_them(config: Path, start: Start) -> None:
    (config.parent / "hold_start").touch()
    terminal = start(command(config, *TWO), config)
    waiting = lambda: len(list(config.parent.glob("hold_start-*"))) == 2  # noqa: E731
    assert wait_until(waiting, terminal.process), terminal.output.decode()
    terminal.press_ctrl_c()
    lines = terminal.end(130)
    assert lines == ["interrupted: nothing was saved"]


def test_a_stage_is_saved_too(toy: Path, tmp_path: Path, start: Start) -> None:
    config = {
        "model": {"megatron": dict(TINY_MODEL)},
        "data": {"tokenizer": str(toy / "tokenizer.model"), "examples": str(toy / "train.jsonl")},
        "training": {"precision": "fp32", "batch_size": 8, "steps": 100_000},
        "checkpoint": {"interval": 1000},
        "logging": {"dir": str(tmp_path / "run")},
    }
    path, metrics = tmp_path / "sft.yaml", tmp_path / "run" / "metrics.jsonl"
    path.write_text(yaml.safe_dump(config))
    terminal = start(command(path, *TWO, what="sft"), path)
    step_1 = lambda: metrics.exists() and '"step": 1' in metrics.read_text()  # noqa: E731
    assert wait_until(step_1, terminal.process), terminal.output.decode()
    terminal.press_ctrl_c()
    lines = terminal.end(75)
    assert lines.count(SAVING) == 1 and lines[-1].startswith("stopped as asked, after step")
    (name,) = set(checkpoint_names(tmp_path / "run")) - {"latest"}
    assert int(name.removeprefix("sft_")) == records(tmp_path / "run")[-1]["step"]


def test_an_ablation_ends_its_run_at_once(config: Path, held: Callable[..., Terminal]) -> None:
    """At Ctrl-C an ablation ends its run immediately, although the run could save itself."""
    terminal = held("--variants=gspo", "--seeds=1", what="ablate")
    terminal.press_ctrl_c()
    lines = terminal.end(130)
    assert lines[-1].endswith("the same command continues from here") and SAVING not in lines
