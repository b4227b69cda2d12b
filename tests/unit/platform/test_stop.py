"""A run that must stop: because of a signal, or before the time limit of its job."""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
from pathlib import Path
from unittest import mock

import pytest

from gspo_megatron.platform import stop as stopping
from gspo_megatron.platform.stop import (
    SlurmJob,
    StopSignals,
    TimeWatch,
    parse_time_left,
)
from gspo_megatron.process.signals import SAVES
from tests.programs import wait_until


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_is_noted_and_does_not_end_the_process(number: signal.Signals) -> None:
    if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL)  # these tests may run under nohup
    before = signal.getsignal(number)
    with pytest.raises(KeyError), StopSignals(enabled=True) as stop:
        assert not stop.is_requested
        os.kill(os.getpid(), number)
        assert stop.is_requested
        raise KeyError  # the handlers are also restored after an error
    assert signal.getsignal(number) is before
    with StopSignals(enabled=False) as stop:  # a run that saves nothing changes no handler
        assert signal.getsignal(number) is before and not stop.is_requested


def test_a_closed_terminal_does_not_stop_a_run_under_nohup() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals(enabled=True) as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.is_requested
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_an_interrupt_is_noted_only_while_the_run_can_be_saved(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """While a run can be saved, the first interrupt is noted, and the second one ends the process.
    An interrupt ends the process at once if SAVES is not set, before the training, and after the
    training."""
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupt = lambda: os.kill(os.getpid(), signal.SIGINT)  # noqa: E731
    try:
        for enabled, saves in ((True, False), (False, True), (True, True)):
            monkeypatch.setattr(os, "environ", {SAVES: "1"} if saves else {})
            with StopSignals(enabled=enabled) as stop:
                with pytest.raises(KeyboardInterrupt):
                    interrupt()
                with pytest.raises(KeyboardInterrupt), stop.at_interrupt(tells=True):
                    interrupt()
                    assert enabled and saves and stop.is_requested
                    interrupt()
                with pytest.raises(KeyboardInterrupt):
                    interrupt()
    finally:
        signal.signal(signal.SIGINT, usual)
    assert wait_until(lambda: "press Ctrl-C again to end at once" in capfd.readouterr().err)


class Job(SlurmJob):
    """A job whose clock the test sets."""

    left = 1000.0

    def seconds_left(self) -> float | None:
        return self.left


@pytest.mark.parametrize(
    ("left", "margin", "longest_step", "stops"),
    [
        (1000.0, 999, 0.0, False),
        (1000.0, 1000, 0.0, True),
        (1000.0, 400, 600.0, True),
        (None, 1e9, 0.0, False),  # the job has no time limit
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
        deadline = time.monotonic() + (60.0 if stops else 1.0)
        while not stop.is_requested and time.monotonic() < deadline:
            time.sleep(0.01)
    assert stop.is_requested == stops


def test_a_log_on_a_full_disk_does_not_keep_a_run_from_stopping(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    full = mock.Mock(write=mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left")))
    monkeypatch.setattr(sys, "stderr", full)
    monkeypatch.setattr(Job, "left", 1.0)
    stop = StopSignals(enabled=False)
    with TimeWatch(stop, 300, Job("7", 0)):
        assert wait_until(lambda: stop.is_requested, seconds=10)
        assert wait_until(lambda: full.write.called, seconds=10)


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


# --- The facts that a process has about its Slurm job; tests/slurm uses the real programs ---------

TIMES = {
    "9": 9,
    "2:03": 123,
    "10:00": 600,
    "1:00:05": 3605,
    "2-01:00:05": 2 * 86400 + 3605,
    "365-00:00:00": 365 * 86400,
    "0:00": 0,
    **dict.fromkeys(("UNLIMITED", "NOT_SET", "INVALID", "")),
}


@pytest.mark.parametrize("text", TIMES)
def test_time_left_as_squeue_prints_it(text: str) -> None:
    assert parse_time_left(text) == TIMES[text]


def test_the_job_of_the_environment() -> None:
    assert SlurmJob.of({}) is None
    assert SlurmJob.of({"SLURM_JOB_ID": ""}) is None
    assert SlurmJob.of({"SLURM_JOB_ID": "7"}) == SlurmJob("7", 0)
    environ = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2", "SLURM_JOB_END_TIME": "1800000000"}
    assert SlurmJob.of(environ) == SlurmJob("7", 2, 1.8e9)
    assert str(SlurmJob.of(environ)) == "Slurm job 7, restart 2"


def fake_squeue(folder: Path, script: str) -> None:
    path = folder / "squeue"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_squeue_tells_the_time_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # a heterogeneous job prints a line for each component
    fake_squeue(tmp_path, 'echo "$*" >"$0.asked"; echo "8 UNLIMITED"; echo "7 1:05"; echo "9 0:07"')
    monkeypatch.setenv("PATH", str(tmp_path))
    assert SlurmJob("7", 0, end=0.0).seconds_left() == 65
    assert (tmp_path / "squeue.asked").read_text() == "--noheader --jobs 7 --format %A %L\n"
    assert SlurmJob("6", 0, end=0.0).seconds_left() is None


@pytest.mark.parametrize("script", [None, "exit 1"])
def test_without_squeue_the_end_that_was_known_at_the_start_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None
) -> None:
    if script:
        fake_squeue(tmp_path, script)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert SlurmJob("7", 0).seconds_left() is None
    left = SlurmJob("7", 0, end=time.time() + 100).seconds_left()
    assert left is not None and 90 < left <= 100
