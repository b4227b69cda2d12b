"""SIGTERM and SIGUSR1 ask; nothing else about them changes."""

from __future__ import annotations

import os
import signal

import pytest

from gspo_megatron.platform.stop import SIGNALS, StopSignals


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
