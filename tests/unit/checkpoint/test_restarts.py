"""Restarts stop when the run makes no progress."""

from __future__ import annotations

from contextlib import nullcontext
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
    """Start the job after `number` restarts. The newest checkpoint is the one of `step`."""
    training = SimpleNamespace(max_restarts_without_progress=allowed)
    config = SimpleNamespace(training=training, logging=SimpleNamespace(dir=str(folder)))
    state = None if step is None else SimpleNamespace(position=Position("rl", step))
    environ = {"SLURM_JOB_ID": job, "SLURM_RESTART_COUNT": str(number)}
    count_restart(config, Start(state=state), environ)  # type: ignore[arg-type]


BEGUN = "restarted 3 times before its first checkpoint"


@pytest.mark.parametrize(
    ("starts", "refusal"),
    [
        ([(number + again, number) for number in range(20) for again in (0, 1)], None),
        # The checkpoint may come from the first start, so three restarts are counted and not four.
        (
            [(n, 5) for n in (1, 2, 3, 4)],
            "restarted 3 times at rl_00000005.*max_restarts_without_progress = 2",
        ),
        ([(n, None) for n in (0, 1, 2, 3)], BEGUN),  # without a checkpoint, the first start counts
    ],
    ids=["they get further", "at the same point", "before the first checkpoint"],
)
def test_the_last_of_too_many_restarts_ends_the_run(
    tmp_path: Path, starts: list[tuple[int, int | None]], refusal: str | None
) -> None:
    for number, step in starts[:-1]:
        restart(tmp_path, number, step)
    with pytest.raises(UserError, match=refusal) if refusal else nullcontext():
        restart(tmp_path, *starts[-1])


def test_a_first_start_leaves_no_file(tmp_path: Path) -> None:
    restart(tmp_path, 0, step=None)
    assert not (tmp_path / RESTARTS_FILE).exists()  # --fresh needs an empty folder


def test_they_are_counted_on_where_the_start_before_is_moved_aside(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    config = tiny_config(logging={"dir": str(folder)})
    for number in range(3):
        restart(folder, number, step=None)
        with RunLock() as lock:
            move_earlier_run(folder, lock)
        RunLogger(config, is_main=True).close()
    assert (tmp_path / "run.2").is_dir()
    with pytest.raises(UserError, match=BEGUN):
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
