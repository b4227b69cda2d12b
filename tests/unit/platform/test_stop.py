"""A run is told to stop by signals, and before a job's time is over."""

from __future__ import annotations

import os
import signal
import time

import pytest

from gspo_megatron.platform import stop as stopping
from gspo_megatron.platform.slurm import SlurmJob
from gspo_megatron.platform.stop import SIGNALS, StopSignals, TimeWatch


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_noted_and_does_not_end_the_process(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(KeyError), StopSignals(enabled=True) as stop:
        assert not stop.is_requested
        os.kill(os.getpid(), number)
        assert stop.is_requested
        raise KeyError  # handlers are put back after an error too
    assert signal.getsignal(number) is before
    with StopSignals(enabled=False) as stop:  # a run that saves nothing leaves signals alone
        assert signal.getsignal(number) is before and not stop.is_requested


class Job(SlurmJob):
    """Whose time passes as told."""

    left = 1000.0

    def seconds_left(self) -> float | None:
        return self.left


@pytest.mark.parametrize(
    ("left", "margin", "longest_step", "stops"),
    [
        (1000.0, 999, 0.0, False),
        (1000.0, 1000, 0.0, True),
        (1000.0, 400, 600.0, True),
        (None, 1e9, 0.0, False),  # a job without a limit
    ],
)
def test_a_stop_is_asked_for_while_there_is_time_for_it(
    monkeypatch: pytest.MonkeyPatch,
    left: float | None,
    margin: float,
    longest_step: float,
    stops: bool,
) -> None:
    monkeypatch.setattr(Job, "left", left)
    stop = StopSignals(enabled=False)
    stop.longest_step = longest_step
    with TimeWatch(stop, margin, Job("7", 0)):
        deadline = time.monotonic() + 1.0
        while not stop.is_requested and time.monotonic() < deadline:
            time.sleep(0.01)
    assert stop.is_requested == stops


def test_the_time_is_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "_LONGEST_WAIT", 0.01)
    job, stop = Job("7", 0), StopSignals(enabled=False)
    with TimeWatch(stop, 300, job):
        time.sleep(0.1)
        assert not stop.is_requested
        monkeypatch.setattr(Job, "left", 299.0)
        deadline = time.monotonic() + 10
        while not stop.is_requested:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_the_longest_step_lies_between_two_boundaries(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    stop = StopSignals(enabled=False)
    for now, longest in ((5.0, 0.0), (7.0, 2.0), (30.0, 23.0), (31.0, 23.0)):  # noqa: B007
        stop.boundary()
        assert stop.longest_step == longest
