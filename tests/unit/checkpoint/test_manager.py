"""The checkpoint manager: the metric of the best checkpoint, disk space, and the checkpoints that
are removed."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import pytest
import torch

from gspo_megatron.checkpoint import manager as checkpoint_manager
from gspo_megatron.checkpoint import writer as checkpoint_writer
from gspo_megatron.checkpoint.folder import Position
from gspo_megatron.checkpoint.manager import Checkpoints
from gspo_megatron.checkpoint.resume import Start
from gspo_megatron.checkpoint.run_state import RunState
from gspo_megatron.checkpoint.start import Session
from gspo_megatron.checkpoint.writer import CheckpointWriter
from gspo_megatron.errors import (
    DataError,
    EpisodeError,
    RewardError,
    RolloutError,
    ServersEndError,
    UserError,
    error_of,
)
from gspo_megatron.models.build import Policy
from gspo_megatron.observe.metrics_files import RL
from gspo_megatron.observe.run_logger import RunLogger
from gspo_megatron.platform.groups import Ranks
from gspo_megatron.platform.stop import StopRun, StopSignals
from tests.unit.models.one_rank import tiny_config, tiny_policy

pytestmark = pytest.mark.usefixtures("one_rank")

REWARDED, EVALUATED = {"reward/mean": 0.5}, {"evaluation/accuracy": 0.5}


def manager(folder: Path, notes: list[str], **section: Any) -> Checkpoints:
    config = tiny_config(
        checkpoint={"interval": 2, **section},
        training={"evaluation_interval": 4, "steps": 9},
        logging={"dir": str(folder / "run")},
        data={"tokenizer": __file__},
    )
    logger = SimpleNamespace(is_main=True, note=notes.append, sync=lambda: None)
    policy, stop = cast(Policy, tiny_policy()), StopSignals(enabled=False)
    checkpoints = Checkpoints(config, policy, cast(RunLogger, logger), Start(), stop)
    nothing = cast(Any, None)
    checkpoints.restore(nothing, nothing)
    return checkpoints


MISTYPED = (
    "warning: checkpoint.best_metric = 'reward/maen': step 2 has no such metric, so its "
    "checkpoint is not kept as one of the best; did you mean reward/mean?"
)
MISSED = "warning: checkpoint.best_metric = 'evaluation/accuracy': step 9 has no such metric"


@pytest.mark.parametrize(
    ("section", "ends", "warning"),
    # For each step: its metrics, and the number of warnings up to this step. Step 1 is not saved.
    [
        ({"best_metric": "reward/maen"}, {1: (REWARDED, 0), 2: (REWARDED, 1), 4: (REWARDED, 1)},
         MISTYPED),
        ({"best_metric": "evaluation/accuracy"},
         {2: (REWARDED, 0), 4: (REWARDED | EVALUATED, 0), 9: (REWARDED, 1)}, MISSED),
        ({"best_metric": "reward/maen", "keep_best": 0}, {2: (REWARDED, 0)}, None),
    ],
    ids=["mistyped", "only after steps with an evaluation", "no best ones are kept"],
)  # fmt: skip
def test_a_missing_metric_is_warned_of_once_in_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, section: Any, ends: Any, warning: str | None
) -> None:
    notes: list[str] = []
    # The checkpoint records the warnings, so a resumed run does not repeat them.
    saved: list[str] = []
    monkeypatch.setattr(Checkpoints, "_prepare", lambda _: (0, None))
    monkeypatch.setattr(Checkpoints, "_save", lambda self, *_, **__: saved.extend(self.warned))
    monkeypatch.setattr(Checkpoints, "_state", lambda *_: SimpleNamespace())
    checkpoints = manager(tmp_path, notes, **{"keep_best": 1, **section})
    for step, (metrics, noted) in ends.items():
        checkpoints.end_of_step(step, metrics, is_last=step == 9)
        assert len(notes) == noted
    assert bool(saved) == bool(notes) == (warning is not None)
    if warning is not None:
        assert notes[0].startswith(warning)


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (RewardError("wrong"), "once the reward works"),
        (RolloutError("wrong"), "once servers answer"),
        (EpisodeError("wrong"), "once the environment works"),
        (error_of("UnplayableError", "wrong"), "once the environment works"),
        # an error that the rollout service reports
        (error_of("EpisodeError", "wrong"), "once the environment works"),
        (DataError("wrong"), "once that is repaired"),
    ],
)
def test_a_run_that_an_error_ends_says_what_has_to_work_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: UserError, advice: str
) -> None:
    monkeypatch.setattr(Checkpoints, "_prepare", lambda _: (0, None))
    monkeypatch.setattr(Checkpoints, "_save", lambda *_, **__: None)
    state = SimpleNamespace(position=Position(RL, 3))
    monkeypatch.setattr(Checkpoints, "_state", lambda *_: state)
    checkpoints = manager(tmp_path, [])
    with pytest.raises(type(error)) as raised:
        checkpoints.after_failure(3, error)
    assert str(raised.value).startswith("wrong\n") and str(raised.value).endswith(advice)
    assert "with 3 finished steps" in str(raised.value)


@pytest.mark.parametrize("step", [0, 3])
def test_a_stop_without_servers_saves_the_run_before_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    saved: list[Any] = []
    monkeypatch.setattr(Checkpoints, "_prepare", lambda _: (0, None))
    monkeypatch.setattr(Checkpoints, "_save", lambda _, state, *__, **___: saved.append(state))
    state = SimpleNamespace(position=Position(RL, step))
    monkeypatch.setattr(Checkpoints, "_state", lambda *_: state)
    checkpoints = manager(tmp_path, [])
    with pytest.raises(StopRun, match=f"^stopped as asked, after step {step} of rl: .*rl_0000000"):
        checkpoints.after_failure(step, error_of("ServersEndError", "ended"))
    assert saved == [state]


def test_a_stop_before_the_first_step_of_a_start_ends_without_an_error(tmp_path: Path) -> None:
    """The servers were told to end while they started, or generated the first evaluation."""
    notes: list[str] = []
    closed: list[bool] = []
    logger: Any = SimpleNamespace(note=notes.append)
    config = tiny_config(logging={"dir": str(tmp_path)})
    ranks = Ranks(rank=0, world_size=1, device=torch.device("cpu"))
    stop, nothing = StopSignals(enabled=False), cast(Any, None)
    session = Session(config, ranks, Start(), stop, nothing)

    def loop() -> None:
        raise ServersEndError("ended")

    assert not session.train(loop, tiny_policy(), lambda: closed.append(True), logger)
    assert closed and notes == [
        "stopped as asked, with nothing new to save; the same command goes on"
    ]


def test_a_save_in_progress_is_published_when_the_weights_are_lost(tmp_path: Path) -> None:
    """The step after an asynchronous save makes the weights non-finite. The run is resumed from
    this save, not from the one before."""
    closed: list[bool] = []
    config = tiny_config(logging={"dir": str(tmp_path)})
    ranks = Ranks(rank=0, world_size=1, device=torch.device("cpu"))
    stop, nothing = StopSignals(enabled=False), cast(Any, None)
    session = Session(config, ranks, Start(), stop, nothing)

    def loop() -> None:
        raise FloatingPointError("the gradient norm is nan")

    with pytest.raises(FloatingPointError):
        session.train(loop, tiny_policy(), lambda: closed.append(True), nothing)
    assert closed == [True]


def test_an_asynchronous_save_counts_only_when_it_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it counted earlier, stored responses of steps that a killed run repeats would be deleted.
    A failed save does not count, so the run is saved again before an error ends it."""
    notes: list[str] = []
    checkpoints = manager(tmp_path, notes, asynchronous=True)

    def state(step: int) -> RunState:
        return RunState(RL, step, {}, {}, {}, "tp=1", 1, {})

    monkeypatch.setattr(checkpoints, "_state", state)
    end_of_step = partial(checkpoints.end_of_step, metrics={})
    saved = checkpoints.folder / "rl_00000002"
    end_of_step(2, is_last=False)
    while checkpoints.writer.is_busy:
        time.sleep(0.01)
    assert not saved.exists() and checkpoints.saved_step(2) == 0
    end_of_step(3, is_last=False)
    assert saved.exists() and checkpoints.saved_step(3) == 2

    def fails(_: Path) -> list[str]:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_writer, "_all_written", fails)
        end_of_step(4, is_last=False)
        while checkpoints.writer.is_busy:
            time.sleep(0.01)
    end_of_step(5, is_last=False)
    assert "No space left on device" in notes[-1] and checkpoints.saved_step(5) == 2
    with pytest.raises(RewardError, match="rl_00000004: the run is saved, with 4 finished steps"):
        checkpoints.after_failure(4, RewardError("wrong"))
    assert (checkpoints.folder / "rl_00000004").exists()

    # A run that goes back to an earlier checkpoint does not need a save that failed.
    taken = MagicMock(return_value=1)
    monkeypatch.setattr(checkpoints, "_take_back", taken)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_writer, "_all_written", fails)
        end_of_step(6, is_last=False)
        alarm = cast(Any, SimpleNamespace(healthy=3))
        assert checkpoints.roll_back(alarm, 7) == 2
    assert len(notes) == 2 and "No space left on device" in notes[-1]
    assert checkpoints.back == saved and taken.call_count == 1


def test_the_best_checkpoints_stay_with_another_metric(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumed run may have another `best_metric`. So a checkpoint has all figures of its
    evaluation."""

    def state(self: Checkpoints, step: int) -> RunState:
        return RunState(RL, step, {}, {}, {}, "tp=1", 1, {})

    monkeypatch.setattr(Checkpoints, "_state", state)

    def save(checkpoints: Checkpoints, step: int, of_suite: float) -> list[str]:
        metrics = {**REWARDED, **EVALUATED, "evaluation/aime/mean": of_suite}
        checkpoints.end_of_step(step, metrics, is_last=False)
        checkpoints.close()
        return sorted(path.name for path in checkpoints.folder.glob("rl_*"))

    first = manager(tmp_path, [], keep_best=1)
    save(first, 2, 0.75)
    assert save(first, 4, 0.5) == ["rl_00000002", "rl_00000004"]
    known = RunState.read(first.folder / "rl_00000002").metrics
    assert known == {"evaluation/accuracy": 0.5, "evaluation/aime/mean": 0.75}
    section = {"keep_last": 1, "keep_best": 1, "best_metric": "evaluation/aime/mean"}
    assert save(manager(tmp_path, [], **section), 6, 0.25) == ["rl_00000002", "rl_00000006"]
    section["best_metric"] = "reward/mean"
    last = manager(tmp_path, [], **section)
    save(last, 8, 0.0)
    assert RunState.read(last.folder / "rl_00000008").metrics["reward/mean"] == 0.5


def test_a_checkpoint_that_an_error_saves_has_the_metrics_of_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rollout of step 4 fails. No save is due after step 3, which is the best step so far."""

    def state(self: Checkpoints, step: int) -> RunState:
        return RunState(RL, step, {}, {}, {}, "tp=1", 1, {})

    monkeypatch.setattr(Checkpoints, "_state", state)
    error = RewardError("wrong")
    checkpoints = manager(tmp_path, [], keep_last=1, keep_best=1, best_metric="reward/mean")
    for step, reward in ((2, 0.5), (3, 0.75)):
        metrics = {"reward/mean": reward}
        checkpoints.end_of_step(step, metrics, is_last=False)
    with pytest.raises(RewardError):
        checkpoints.after_failure(3, error)
    checkpoints.end_of_step(4, {"reward/mean": 0.25}, is_last=False)
    checkpoints.close()
    names = sorted(path.name for path in checkpoints.folder.glob("rl_*"))
    assert names == ["rl_00000003", "rl_00000004"]
    # The evaluation of step 5 fails. The resumed run saves the step again, with its figures.
    with pytest.raises(RewardError):
        checkpoints.after_failure(5, error, {"loss": 0.5})
    assert RunState.read(checkpoints.folder / "rl_00000005").metrics == {}


def test_the_last_step_of_a_phase_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next phase begins with this checkpoint. The interval is 2."""

    def state(self: Checkpoints, step: int) -> RunState:
        return RunState(self.phase, step, {}, {}, {}, "tp=1", 1, {})

    monkeypatch.setattr(Checkpoints, "_state", state)
    checkpoints = manager(tmp_path, [])
    for step in (1, 3):
        checkpoints.end_of_step(step, {}, is_last=False, is_border=step == 3)
    assert checkpoints.next_start().checkpoint == checkpoints.folder / "rl_00000003"
    assert not (checkpoints.folder / "rl_00000001").exists()


def test_checkpoints_that_a_rollback_needs_stay(tmp_path: Path) -> None:
    checkpoints = manager(tmp_path, [], keep_last=1)
    for step in (2, 4, 6, 8, 9):
        (checkpoints.folder / Position(RL, step).name).mkdir(parents=True)
    checkpoints.watch = cast(Any, SimpleNamespace(healthy_step=5, healthy=8))
    checkpoints._drop_surplus(Position(RL, 9))
    checkpoints.writer.wait_for_removal()
    left = sorted(path.name for path in checkpoints.folder.iterdir())
    assert left == [Position(RL, step).name for step in (4, 6, 9)]


def test_damaged_checkpoints_after_the_newest_do_not_count(tmp_path: Path) -> None:
    """A run that was resumed from a checkpoint before the damaged ones keeps the newest complete
    checkpoints."""
    checkpoints = manager(tmp_path, [], keep_last=2)
    for step in (1, 2, 3, 5, 6):  # 5 and 6 are damaged: the run was resumed from 2
        (checkpoints.folder / Position(RL, step).name).mkdir(parents=True)
    checkpoints._drop_surplus(Position(RL, 3))
    checkpoints.writer.wait_for_removal()
    left = sorted(path.name for path in checkpoints.folder.iterdir())
    assert left == [Position(RL, step).name for step in (2, 3, 5, 6)]


def test_a_disk_without_room_for_the_file_latest_gets_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last bytes of the disk went into the new checkpoint. If the old one stayed, no later
    checkpoint would find room."""
    notes: list[str] = []
    checkpoints = manager(tmp_path, notes, keep_last=1)

    def state(step: int) -> RunState:
        return RunState(RL, step, {}, {}, {}, "tp=1", 1, {})

    def fails(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints, "_state", state)
    monkeypatch.setattr(checkpoint_manager, "set_latest", fails)
    for step in (2, 4):
        checkpoints.end_of_step(step, {}, is_last=False)
    checkpoints.close()
    assert [path.name for path in checkpoints.folder.glob("rl_*")] == ["rl_00000004"]
    assert len(notes) == 2 and "it is complete, but " in notes[-1]


def test_room_that_a_removal_is_making_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    surplus = tmp_path / ".partial-surplus"
    surplus.mkdir()

    def remove_slowly(paths: Sequence[Path]) -> None:
        time.sleep(0.3)
        for path in paths:
            shutil.rmtree(path)

    monkeypatch.setattr(checkpoint_writer, "_remove", remove_slowly)
    monkeypatch.setattr(checkpoint_writer, "free_bytes", lambda _: 0 if surplus.exists() else 1e12)
    writer = CheckpointWriter(tmp_path, tiny_policy())
    writer.remove([surplus])
    refusal = writer.begin("new", None, lambda _: None, asynchronous=False)
    assert refusal is None and writer.finish() is None
    assert (tmp_path / "new").is_dir()

    surplus.mkdir()  # nothing removes this folder
    refusal = writer.begin("newer", None, lambda _: None, asynchronous=False)
    assert refusal is not None and "0 are free" in refusal
