"""The seconds in which calls are in progress, counted once however many there are."""

from __future__ import annotations

import time

import pytest

from gspo_megatron.process.coroutines import BusySeconds


def test_busy_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 10.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    busy = BusySeconds()
    assert busy.seconds == 0
    busy.begin()
    now = 12.0
    busy.begin()
    busy.end()
    now = 13.0
    assert busy.seconds == 3
    busy.end()
    now = 20.0
    assert busy.seconds == 3
    busy.begin(2)
    now = 21.0
    assert (busy.seconds, busy.take()) == (4, 4)
    now = 23.0
    busy.end(2)
    assert (busy.take(), busy.take()) == (2, 0)
