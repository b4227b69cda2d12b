"""A new run starts in a folder that contains an earlier run."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from gspo_megatron.checkpoint import run_lock
from gspo_megatron.checkpoint.folder import CHECKPOINTS, REFERENCE
from gspo_megatron.checkpoint.run_lock import LOCK_FILE, RunLock
from gspo_megatron.checkpoint.start import move_earlier_run
from gspo_megatron.errors import UserError
from gspo_megatron.observe.metrics_files import METRICS_FILE


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    """The folder of a run that was killed while it wrote its first checkpoint."""
    folder = tmp_path / "run"
    for name in (".partial-rl_00000001-0badcafe/model", REFERENCE):
        (folder / CHECKPOINTS / name).mkdir(parents=True)
    (folder / CHECKPOINTS / ".partial-rl_00000001-0badcafe" / "model" / "__0_0.distcp").touch()
    (folder / METRICS_FILE).write_text("{}\n")
    (folder / LOCK_FILE).touch()
    return folder


@pytest.fixture
def lock(monkeypatch: pytest.MonkeyPatch) -> Iterator[RunLock]:
    monkeypatch.setattr(run_lock, "_PATIENCE", 0.3)
    with RunLock() as lock:
        yield lock


def test_a_folder_without_a_run_stays(tmp_path: Path, lock: RunLock) -> None:
    move_earlier_run(tmp_path / "run", lock)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert [path.name for path in (tmp_path / "run").iterdir()] == [LOCK_FILE]


def test_the_new_folder_is_held_as_the_old_one_was(earlier: Path, lock: RunLock) -> None:
    move_earlier_run(earlier, lock)
    assert (earlier.with_name("run.1") / METRICS_FILE).read_text() == "{}\n"
    assert [path.name for path in earlier.iterdir()] == [LOCK_FILE]
    with pytest.raises(UserError, match="another run is at work here"):
        RunLock().hold(earlier)


def test_a_link_to_the_folder_leads_to_the_new_run(earlier: Path, lock: RunLock) -> None:
    """The link may lead to the disk that has room for runs."""
    link = earlier.with_name("link")
    link.symlink_to("run")
    move_earlier_run(link, lock)
    assert (earlier.with_name("run.1") / METRICS_FILE).exists() and link.resolve() == earlier
    assert [path.name for path in link.iterdir()] == [LOCK_FILE]
    for folder in (link, earlier):
        with pytest.raises(UserError, match="another run is at work here"):
            RunLock().hold(folder)


def test_what_was_half_written_is_not_kept(earlier: Path, lock: RunLock) -> None:
    move_earlier_run(earlier, lock)
    kept = earlier.with_name("run.1") / CHECKPOINTS
    assert [path.name for path in kept.iterdir()] == [REFERENCE]


def test_a_folder_that_cannot_be_renamed(
    earlier: Path, lock: RunLock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mount point has no other name, and relative paths would follow the current folder."""
    for folder, working in ((".", earlier), ("..", earlier / CHECKPOINTS)):
        monkeypatch.chdir(working)
        wrong = rf"logging.dir = '{re.escape(folder)}': holds an earlier run, .* runs inside of it"
        with pytest.raises(UserError, match=wrong):
            move_earlier_run(Path(folder), lock)

    def busy(*_: object) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(earlier))

    monkeypatch.chdir(earlier.parent)
    monkeypatch.setattr(Path, "rename", busy)
    with pytest.raises(UserError, match="busy; move its files away, or give another folder"):
        move_earlier_run(earlier, lock)


def test_the_folder_of_a_run_at_work_is_not_moved(earlier: Path, lock: RunLock) -> None:
    lock.hold(earlier)
    with pytest.raises(UserError, match="another run is at work here"):
        move_earlier_run(earlier, RunLock())
    assert list(earlier.parent.iterdir()) == [earlier]


def test_a_run_that_took_the_name_in_between_keeps_it(earlier: Path, lock: RunLock) -> None:
    class Slow(RunLock):
        def hold(self, folder: Path) -> None:
            if not folder.exists():
                lock.hold(folder)
                (folder / METRICS_FILE).touch()
            super().hold(folder)

    slow = Slow()
    with pytest.raises(UserError, match="another run is at work here"):
        move_earlier_run(earlier, slow)
    slow.release()
    assert sorted(path.name for path in earlier.parent.iterdir()) == ["run", "run.1"]
    assert sorted(path.name for path in earlier.iterdir()) == [LOCK_FILE, METRICS_FILE]
