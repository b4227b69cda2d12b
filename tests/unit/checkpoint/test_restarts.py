"""Giving up where restarts get no further."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from gspo_megatron.checkpoint.folder import Position
from gspo_megatron.checkpoint.resume import Start
from gspo_megatron.checkpoint.run_lock import RunLock
from gspo_megatron.checkpoint.start import RESTARTS_FILE, count_restart, move_earlier_run
from gspo_megatron.errors import UserError
from gspo_megatron.observe.run_logger import RunLogger
from tests.unit.models.one_rank import tiny_config


def restart(
    folder: Path, number: int, step: int | None, *, job: str = "7", allowed: int = 2
) -> None:
    """A start of the job, with the newest checkpoint after `step`."""
    training = SimpleNamespace(idle_restarts=allowed)
    config = SimpleNamespace(training=training, logging=SimpleNamespace(dir=str(folder)))
    state = None if step is None else SimpleNamespace(position=Position("rl", step))
    environ = {"SLURM_JOB_ID": job, "SLURM_RESTART_COUNT": str(number)}
    count_restart(config, Start(state=state), environ)  # type: ignore[arg-type]


def test_restarts_that_get_further_are_never_too_many(tmp_path: Path) -> None:
    for number in range(20):
        restart(tmp_path, number, step=number)
        restart(tmp_path, number + 1, step=number)


def test_restarts_at_the_same_point_end_the_run(tmp_path: Path) -> None:
    restart(tmp_path, 1, step=5)  # the first start may have written that checkpoint
    restart(tmp_path, 2, step=5)
    restart(tmp_path, 3, step=5)
    with pytest.raises(UserError, match=r"restarted 3 times at rl_00000005.*idle_restarts = 2"):
        restart(tmp_path, 4, step=5)


def test_before_the_first_checkpoint_the_first_start_counts(tmp_path: Path) -> None:
    restart(tmp_path, 0, step=None)
    assert not (tmp_path / RESTARTS_FILE).exists()  # --fresh wants an empty folder
    restart(tmp_path, 1, step=None)
    restart(tmp_path, 2, step=None)
    with pytest.raises(UserError, match="before its first checkpoint"):
        restart(tmp_path, 3, step=None)


def test_they_are_counted_on_where_the_start_before_is_moved_aside(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    config = tiny_config(logging={"dir": str(folder)})
    for number in range(3):
        restart(folder, number, step=None)
        with RunLock() as lock:
            move_earlier_run(folder, lock)
        RunLogger(config, is_main=True).close()
    assert (tmp_path / "run.2").is_dir()
    with pytest.raises(UserError, match="restarted 3 times before its first checkpoint"):
        restart(folder, 3, step=None)


def test_another_job_begins_to_count_anew(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        restart(tmp_path, number, step=5)
    restart(tmp_path, 0, step=5, job="8")
    restart(tmp_path, 1, step=5, job="8")
    restart(tmp_path, 2, step=5, job="8")


def test_a_damaged_file_or_no_job_counts_for_nothing(tmp_path: Path) -> None:
    (tmp_path / RESTARTS_FILE).write_text("[1")
    restart(tmp_path, 9, step=5, allowed=0)
    count_restart(SimpleNamespace(), Start(), {})  # type: ignore[arg-type]
