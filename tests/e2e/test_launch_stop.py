"""The launcher of ranks that save themselves when they are told to end."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.e2e.launching import Start, launches

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


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts the launcher of two ranks that save themselves, with hardly any time for others."""
    with launches(tmp_path) as begin:
        yield partial(begin, grace=0.1, settle=0.1, saves_on_signals=True)


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
