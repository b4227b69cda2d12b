"""A process that hangs is ended, and reports the place in the code at which it hung."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from gspo_megatron.process.heartbeat import HUNG

_PROGRAM = """
import ctypes, sys, time
from pathlib import Path
from gspo_megatron.process.heartbeat import Heartbeat, heartbeat

def stand_still():
    time.sleep(60)

def keep_the_interpreter():
    ctypes.PyDLL(None).sleep(60)  # unlike CDLL's, its calls do not let other threads run

def work(seconds, tell):
    for _ in range(20 * seconds):
        tell()
        time.sleep(0.05)

rank, doing, timeout, together = int(sys.argv[2]), sys.argv[3], float(sys.argv[4]), int(sys.argv[5])
folder = Path(sys.argv[1])
(folder / f"ready_{rank}").touch()
while len(list(folder.glob("ready_*"))) < together:
    time.sleep(0.01)
watcher = Heartbeat(folder, rank, 2, timeout)
with watcher:
    exec(doing)
print("done")
"""


def start(
    folder: Path, rank: int, doing: str, timeout: float = 1.0, together: int = 1
) -> subprocess.Popen[str]:
    """Start a rank. `together`: the number of ranks that start at the same time."""
    words = [str(folder), str(rank), doing, str(timeout), str(together)]
    return subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def end(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def start_two(folder: Path, *doing: str, timeout: float) -> list[subprocess.Popen[str]]:
    return [start(folder, rank, what, timeout, together=2) for rank, what in enumerate(doing)]


def silence_in(text: str) -> int:
    found = re.search(r"nothing has moved for (\d+) s", text)
    assert found is not None
    return int(found[1])


def test_all_who_stand_still_tell_where(tmp_path: Path) -> None:
    processes = start_two(tmp_path, "stand_still()", "stand_still()", timeout=3.0)
    for rank, process in enumerate(processes):
        code, _, err = end(process)
        assert code == HUNG
        stacks = (tmp_path / "hang" / f"rank_{rank:05d}.txt").read_text()
        assert stacks.startswith(f"rank {rank} on ")
        assert "nothing has moved for" in stacks and "in stand_still" in stacks
        assert stacks.rstrip() in err
        assert "no stacks from" not in err


def test_a_rank_that_tells_nothing_is_named(tmp_path: Path) -> None:
    code, _, err = end(start(tmp_path, 1, "stand_still()"))
    assert code == HUNG and "no stacks from rank 0" in err


def test_a_rank_that_looks_suspicious_joins_the_first(tmp_path: Path) -> None:
    (tmp_path / "hang").mkdir()
    (tmp_path / "hang" / "first").touch()
    process = start(tmp_path, 0, "stand_still()", timeout=60.0)
    # The rank is not suspicious in the first half of its time limit.
    with pytest.raises(subprocess.TimeoutExpired):
        process.communicate(timeout=3)
    process.kill()
    process.communicate()
    code, _, err = end(start(tmp_path, 0, "stand_still()", timeout=4.0))
    assert code == HUNG and silence_in(err) < 4  # the rank ended before its own time limit


def test_a_thread_that_keeps_the_interpreter_is_found_too(tmp_path: Path) -> None:
    code, _, err = end(start(tmp_path, 0, "keep_the_interpreter()"))
    assert code == 1 and "Timeout" in err and "in keep_the_interpreter" in err


def test_full_disks_do_not_keep_the_stacks(tmp_path: Path) -> None:
    full = "import tempfile; tempfile.tempdir = '/nowhere'; stand_still()"
    code, _, err = end(start(tmp_path, 0, full))
    assert code == HUNG and "in stand_still" in err
    full = "sys.stderr = open('/dev/full', 'w'); stand_still()"
    assert end(start(tmp_path, 1, full))[0] == HUNG
    assert "in stand_still" in (tmp_path / "hang" / "rank_00001.txt").read_text()


@pytest.mark.parametrize("timeout", [2.5, 0.0])
def test_a_rank_that_moves_is_left_alone(tmp_path: Path, timeout: float) -> None:
    assert end(start(tmp_path, 0, "work(4, watcher.beat)", timeout)) == (0, "done\n", "")
    assert not (tmp_path / "hang").exists()


def test_a_rank_that_waits_for_one_that_works_is_left_alone(tmp_path: Path) -> None:
    """In a run, ranks may wait for the rank with the most to save, or with the slowest rewards."""
    for process in start_two(tmp_path, "time.sleep(4)", "work(5, heartbeat)", timeout=2.0):
        assert end(process) == (0, "done\n", "")


def test_work_that_stops_is_found_by_all_who_wait_for_it(tmp_path: Path) -> None:
    processes = start_two(
        tmp_path, "stand_still()", "work(4, heartbeat); stand_still()", timeout=2.0
    )
    for rank, process in enumerate(processes):
        code, _, err = end(process)
        assert code == HUNG
        stacks = (tmp_path / "hang" / f"rank_{rank:05d}.txt").read_text()
        assert silence_in(stacks) < 6  # the wait itself has lasted for 6 seconds
        assert "in stand_still" in stacks and "no stacks from" not in err
