"""Files of windows: what a rank that was killed has left does not stay."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from gspo_megatron.platform.cpu import windows


def test_a_window_that_a_killed_rank_has_left_is_removed_by_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(windows, "MEMORY", str(tmp_path))
    forgotten, other = (Path(windows._new_file(2)) for _ in "ab")
    weights, foreign = tmp_path / "gspo-megatron-weights-1", tmp_path / "else"
    weights.mkdir()
    foreign.touch()
    hours_ago = time.time() - 7200
    for path in (forgotten, weights, foreign):
        os.utime(path, (hours_ago, hours_ago))
    newest = Path(windows._new_file(2))
    assert sorted(tmp_path.iterdir()) == sorted([other, weights, foreign, newest])


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_windows_of_other_users_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(windows, "MEMORY", str(tmp_path))
    path = Path(windows._new_file(2))
    os.utime(path, (0, 0))
    os.chown(path, 12345, -1)
    windows._new_file(2)
    assert path.exists()
