"""Two runs never share a run folder."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gspo_megatron import files
from gspo_megatron.checkpoint import run_lock
from gspo_megatron.checkpoint.run_lock import LOCK_FILE, RunLock
from gspo_megatron.errors import UserError

HOLDER = """
import sys, time
from pathlib import Path
from gspo_megatron.checkpoint.run_lock import RunLock
lock = RunLock()
lock.hold(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[str]]:
    """Start another process that holds the folder, in Slurm job 7."""
    monkeypatch.setattr(run_lock, "_PATIENCE", 0.3)
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"SLURM_JOB_ID": "7"},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_second_run_is_refused_and_told_of_the_first(
    tmp_path: Path, other: subprocess.Popen[str]
) -> None:
    with pytest.raises(UserError, match=f"process {other.pid}, Slurm job 7") as error:
        RunLock().hold(tmp_path)
    assert str(tmp_path / LOCK_FILE) in str(error.value)


def test_a_folder_that_cannot_be_made_is_left_to_the_next_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The error is the same as for a folder that another run renames: no such file."""
    monkeypatch.setattr(files, "_LAGS", ())
    RunLock().hold(Path("/proc/none"))


def test_a_requeued_job_is_let_in_where_the_lock_of_a_lost_node_is_still_there(
    tmp_path: Path, other: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    RunLock().hold(tmp_path)


@pytest.mark.parametrize("restart", ["0", "", "x"])
def test_two_steps_of_a_job_do_not_share_a_folder(
    tmp_path: Path, other: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch, restart: str
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", restart)
    with pytest.raises(UserError, match="another run is at work here"):
        RunLock().hold(tmp_path)


@pytest.mark.parametrize("has_died", [True, False])
def test_the_end_of_its_run_or_a_removed_lock_file_frees_the_folder(
    tmp_path: Path, other: subprocess.Popen[str], has_died: bool
) -> None:
    if has_died:
        other.kill()
    else:
        (tmp_path / LOCK_FILE).unlink()
    with RunLock() as lock:
        lock.hold(tmp_path)


def test_a_run_may_hold_its_folder_twice_and_another_beside_it(tmp_path: Path) -> None:
    lock = RunLock()
    lock.hold(tmp_path)
    lock.hold(tmp_path)
    # A new start moves an earlier run aside in this way.
    moved = tmp_path.rename(tmp_path.with_name("moved"))
    tmp_path.mkdir()
    lock.hold(tmp_path)
    assert (moved / LOCK_FILE).exists()
    lock.release()
    again = RunLock()
    again.hold(tmp_path)
    again.release()


def test_of_two_that_begin_a_new_run_one_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_lock, "_PATIENCE", 0.3)
    folder = tmp_path / "runs" / "new"
    with RunLock() as lock:
        lock.hold(folder)
        assert [path.name for path in folder.iterdir()] == [LOCK_FILE]
        with pytest.raises(UserError, match=f"{folder}: another run is at work here"):
            RunLock().hold(folder)


def test_a_run_that_is_refused_leaves_no_folder(tmp_path: Path) -> None:
    new, used, given = (tmp_path / name for name in ("new", "used", "given"))
    given.mkdir()
    lock = RunLock()
    for folder in (new, used, given):
        lock.hold(folder)
    (used / "metrics.jsonl").touch()
    lock.release()
    assert not new.exists()
    assert sorted(os.listdir(used)) == [LOCK_FILE, "metrics.jsonl"]
    assert given.exists()


def test_what_cannot_be_made_is_not_locked(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    RunLock().hold(tmp_path / "file")
    RunLock().hold(tmp_path / "file" / "run")


@pytest.mark.parametrize("named_again", [True, False])
def test_a_folder_that_was_moved_aside_before_it_could_be_locked_is_not_the_run_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named_again: bool
) -> None:
    """Another start held the folder, renamed it and died."""
    folder, moved = tmp_path / "run", tmp_path / "run.1"
    before = run_lock._lock

    def lock_late(file: int) -> None:
        if not moved.exists():
            folder.rename(moved)
            if named_again:
                folder.mkdir()
        before(file)

    monkeypatch.setattr(run_lock, "_lock", lock_late)
    monkeypatch.setattr(run_lock, "_PATIENCE", 0.3)
    with RunLock() as lock:
        lock.hold(folder)
        assert (folder / LOCK_FILE).exists()
        with pytest.raises(UserError, match="another run is at work here"):
            RunLock().hold(folder)


def test_a_folder_that_never_stays_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_lock, "_is_at", lambda *_: False)
    with pytest.raises(UserError, match="another run moved it at each attempt"):
        RunLock().hold(tmp_path)
