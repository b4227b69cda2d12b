"""The pace that the progress display of a supervised stage shows."""

from __future__ import annotations

import io
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from gspo_megatron.observe.progress import Progress
from gspo_megatron.supervised import loop


def test_an_evaluation_before_the_first_step_is_no_part_of_the_pace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of four steps of three seconds, nine seconds are left after the first one."""
    seconds, stream = [0.0], io.StringIO()
    progress = Progress(4, "SFT", stream, clock=lambda: seconds[0])

    def nothing(*_: Any, **__: Any) -> None: ...

    def lasting(duration: float, metrics: dict[str, float]) -> Callable[..., dict[str, float]]:
        def work(*_: Any) -> dict[str, float]:
            seconds[0] += duration
            return {**metrics}

        return work

    updater = SimpleNamespace(evaluate=lasting(300.0, {"evaluation/loss": 2.0}))
    monkeypatch.setattr(loop, "Schedule", SimpleNamespace(of=nothing))
    monkeypatch.setattr(loop, "build_trainer", nothing)
    monkeypatch.setattr(loop, "timed_step", lasting(3.0, {"loss": 1.0}))
    monkeypatch.setattr(loop.SupervisedLoop, "_updater", lambda *_: updater)
    training = SimpleNamespace(steps=4, evaluation_interval=0)
    parts: list[Any] = [
        SimpleNamespace(phase="sft", optimizer=None, training=training),
        None,
        SimpleNamespace(evaluation=nothing),
        SimpleNamespace(progress=lambda *_: progress, write=nothing),
        SimpleNamespace(restore=lambda *_: 0, end_of_step=nothing),
    ]
    loop.SupervisedLoop(*parts).run()
    told = [line for line in stream.getvalue().splitlines() if line.startswith("SFT")]
    assert told[0] == "SFT  1/4  loss 1.00  3.00 s/step  ETA 9.00 s"
