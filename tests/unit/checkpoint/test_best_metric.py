"""What is said where a checkpoint cannot be among the best, for lack of a figure to go by."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gspo_megatron.checkpoint.manager import Checkpoints
from gspo_megatron.checkpoint.resume import Start
from gspo_megatron.models.build import Policy
from gspo_megatron.models.optimizer import Trainer
from gspo_megatron.observe.metrics_files import RL, WARM_START
from gspo_megatron.observe.run_logger import RunLogger
from gspo_megatron.platform.stop import StopSignals
from tests.unit.models.one_rank import tiny_config, tiny_policy

pytestmark = pytest.mark.usefixtures("one_rank")

REWARDED, EVALUATED = {"reward/mean": 0.5}, {"evaluation/accuracy": 0.5}


class Run:
    """Checkpoints of which nothing is written, and what is noted of them."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, **section: Any) -> None:
        config = tiny_config(
            checkpoint={"interval": 2, "keep_best": 1, **section},
            training={"evaluation_interval": 4, "steps": 9},
            logging={"dir": str(folder / "run")},
        )
        self.notes: list[str] = []
        self.said: list[str] = []
        record = SimpleNamespace(is_main=True, note=self.notes.append)
        monkeypatch.setattr(Checkpoints, "_prepare", lambda _: None)
        monkeypatch.setattr(Checkpoints, "_save", lambda _, state, *__, **___: self._saved(state))
        monkeypatch.setattr(Checkpoints, "_state", lambda *_: SimpleNamespace())
        self.checkpoints = Checkpoints(
            config,
            cast(Policy, tiny_policy()),
            cast(RunLogger, record),
            Start(),
            StopSignals(enabled=False),
        )

    def _saved(self, state: object) -> None:
        self.said = list(self.checkpoints.said)

    def end(self, step: int, metrics: dict[str, float], phase: str = RL, last: bool = False) -> int:
        """Of a step. Returns how much was noted so far."""
        trainer = cast(Trainer, None)
        self.checkpoints.end_of_step(phase, step, trainer, cast(Any, None), metrics, is_last=last)
        return len(self.notes)


def test_a_mistyped_figure_is_told_of_once_in_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, monkeypatch, best_metric="reward/maen")
    assert run.end(1, REWARDED) == 0  # not saved
    assert run.end(2, REWARDED) == 1
    assert run.notes[0] == (
        "warning: checkpoint.best_metric = 'reward/maen': no figure of step 2, whose checkpoint "
        "is not kept for it; did you mean reward/mean?"
    )
    assert run.end(4, REWARDED) == 1
    assert run.said, "a resumed run would say it again"


def test_an_evaluation_is_missed_only_after_steps_that_have_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, monkeypatch, best_metric="evaluation/accuracy")
    assert run.end(2, REWARDED, WARM_START) == 0
    assert run.end(2, REWARDED) == 0
    assert run.end(4, REWARDED | EVALUATED) == 0
    assert run.end(9, REWARDED, last=True) == 1


def test_without_best_checkpoints_no_figure_is_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, monkeypatch, best_metric="reward/maen", keep_best=0)
    assert run.end(2, REWARDED) == 0
