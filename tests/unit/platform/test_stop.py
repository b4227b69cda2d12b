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
    with StopSignals(enabled=True) as stop:
        assert not stop.is_requested
        os.kill(os.getpid(), number)
        assert stop.is_requested
    assert signal.getsignal(number) is before


def test_a_run_that_saves_nothing_leaves_signals_alone() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    with StopSignals(enabled=False) as stop:
        assert [signal.getsignal(number) for number in SIGNALS] == before
    assert not stop.is_requested


def test_they_are_put_back_after_an_error() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    with pytest.raises(KeyError), StopSignals(enabled=True):
        raise KeyError
    assert [signal.getsignal(number) for number in SIGNALS] == before


class Job(SlurmJob):
    """Whose time passes as told."""

    left = 1000.0

    def seconds_left(self) -> float | None:
        return self.left


def is_stopped(watched: Job, margin: float, longest_step: float = 0.0) -> bool:
    stop = StopSignals(enabled=False)
    stop.longest_step = longest_step
    with TimeWatch(stop, margin, watched):
        deadline = time.monotonic() + 1.0
        while not stop.is_requested and time.monotonic() < deadline:
            time.sleep(0.01)
    return stop.is_requested


def test_a_stop_is_asked_for_while_there_is_time_for_it() -> None:
    job = Job("7", 0)
    assert not is_stopped(job, margin=999)
    assert is_stopped(job, margin=1000)
    assert is_stopped(job, margin=400, longest_step=600)


def test_a_job_without_a_limit_is_never_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job("7", 0)
    monkeypatch.setattr(Job, "left", None)
    assert not is_stopped(job, margin=1e9)


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
