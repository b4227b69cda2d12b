"""A run with a tracker: `train` in a new folder, and then the resumed run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.resuming import all_records
from tests.programs import gspo


def test_tensorboard_has_the_metrics_of_a_new_run_and_of_the_resumed_one(config_file: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    words = ("train", config_file, "logging.trackers=[tensorboard]")
    run = config_file.parent / "run"
    for steps in (1, 2):
        gspo(*words, f"training.steps={steps}", "checkpoint.interval=1")
        tracked = events.EventAccumulator(str(run / "tensorboard"), purge_orphaned_data=False)
        tracked.Reload()
        records = all_records(run, "rl")
        assert [record["step"] for record in records] == [*range(steps + 1)]
        for name in ("reward/mean", "loss", "grad_norm", "perf/step_seconds"):
            expected = [(each["step"], each[name]) for each in records if name in each]
            found = [(event.step, event.value) for event in tracked.Scalars(name)]
            assert found == [(step, pytest.approx(value)) for step, value in expected]
