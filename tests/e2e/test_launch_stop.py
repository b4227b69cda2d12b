"""The launcher of ranks that save themselves when they are told to end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.test_launch import PATIENCE, PREAMBLE, ROOT, Launch

LAUNCHER = """
import sys
from gspo_megatron.cli.launch import launch
times = {"grace_seconds": 0.1, "settle_seconds": 0.1}
sys.exit(launch(sys.argv[1:], 2, saves_on_signals=True, **times))
"""

# A rank that notes the signal, and ends in an orderly way later, when the test lets it.
SAVES = """
asked = []
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda *_: asked.append(True))
say("ready")
while not asked:
    threading.Event().wait(0.01)
say("asked")
await_word("go", 0)
"""

Start = Callable[[str], Launch]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts the launcher with two ranks of a script."""
    launched: list[Launch] = []

    def begin(script: str) -> Launch:
        path = tmp_path / "rank.py"
        path.write_text(PREAMBLE + textwrap.dedent(script))
        process = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER, sys.executable, str(path), str(tmp_path)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        launched.append(Launch(tmp_path, process))
        return launched[-1]

    yield begin
    for launch in launched:
        launch.process.kill()
        launch.process.communicate(timeout=PATIENCE)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_the_ranks_take_the_time_they_need(start: Start, number: signal.Signals) -> None:
    launch = start(SAVES + "threading.Event().wait(0.5)  # longer than the grace\nsys.exit(75)")
    launch.await_word("ready", 0, 1)
    launch.process.send_signal(number)
    launch.await_word("asked", 0, 1)
    (launch.folder / "go-0").touch()
    code, out, err = launch.end()
    assert (code, out) == (75, "")
    assert ("told to end" in err) == (number == signal.SIGTERM)


def test_a_run_that_ends_by_itself_meanwhile_is_done(start: Start) -> None:
    launch = start(SAVES)
    launch.await_word("ready", 0, 1)
    launch.process.send_signal(signal.SIGTERM)
    launch.await_word("asked", 0, 1)
    (launch.folder / "go-0").touch()
    assert launch.end()[0] == 0


def test_asked_twice_the_ranks_end_now(start: Start) -> None:
    launch = start(SAVES)
    launch.await_word("ready", 0, 1)
    launch.process.send_signal(signal.SIGTERM)
    launch.await_word("asked", 0, 1)
    launch.process.send_signal(signal.SIGTERM)
    assert launch.end()[0] == 143
    assert launch.survivors() == []


def test_a_rank_that_is_not_ready_yet_ends_the_others(start: Start) -> None:
    launch = start('if rank == 0:\n    say("ready")\n    block()\n' + SAVES)
    launch.await_word("ready", 0, 1)
    launch.process.send_signal(signal.SIGTERM)
    assert launch.end()[0] == 143
    assert launch.survivors() == []


def test_what_goes_wrong_while_saving_is_told(start: Start) -> None:
    launch = start(
        "join_launcher()\n" + SAVES + 'sys.exit(tell_failure(UserError("the disk is full")))'
    )
    launch.await_word("ready", 0, 1)
    launch.process.send_signal(signal.SIGTERM)
    launch.await_word("asked", 0, 1)
    (launch.folder / "go-0").touch()
    code, _, err = launch.end()
    assert (code, err.splitlines()[-1]) == (2, "the disk is full")
