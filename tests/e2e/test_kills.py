"""Deaths and faults of ranks that tests of single functions do not cover. The run ends and names
the cause, or it continues. In the end every step occurs once, as in a run without faults.
test_crash has kills at random moments."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from tests.e2e.resuming import (
    all_records,
    assert_same_run,
    checkpoint_names,
    command,
    environment,
    make_small,
)
from tests.programs import wait_until

pytestmark = [pytest.mark.full, pytest.mark.timeout(1200)]

STEPS = 8
LAST = f"rl_{STEPS:08d}"
TWO = "parallel.layout=dp=2"
_END_SECONDS = 300
# In a mount namespace, a folder of the test takes the place of /dev/shm.
_IN_A_NAMESPACE = ("unshare", "--mount", "--propagation", "private", "sh", "-e", "-c")
_OWN_MEMORY = 'mount --bind "$0" /dev/shm; exec "$@"'
# This module is loaded in every process of a run. Once the file `set_back` exists, the clock is an
# hour behind.
_CLOCK = """
import os, time
_folder, _time, _time_ns = os.path.dirname(__file__), time.time, time.time_ns
def _behind():
    return 3600 * os.path.exists(os.path.join(_folder, "set_back"))
time.time = lambda: _time() - _behind()
time.time_ns = lambda: _time_ns() - _behind() * 10**9
"""


def may_mount() -> bool:
    """Whether this user may make a mount namespace and mount in it."""
    try:
        words = [*_IN_A_NAMESPACE, "mount -t tmpfs tmpfs /mnt"]
        return subprocess.run(words, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


needs_mounts = pytest.mark.skipif(not may_mount(), reason="no file system may be mounted here")


class Runs:
    """Starts runs of a configuration, and finds their processes."""

    def __init__(self, config: Path) -> None:
        self.config, self.folder = config, config.parent
        self.run, self.undisturbed = self.folder / "killed", self.folder / "undisturbed"
        self.memory = self.folder / "shm"
        self.memory.mkdir()

    def start(
        self, *words: str, run: Path | None = None, inside: Sequence[str] = ()
    ) -> subprocess.Popen[str]:
        """Start the run. inside: the beginning of a command that runs another command."""
        whole = command(self.config, f"logging.dir={run or self.run}", *words)
        with (self.folder / "stderr").open("w") as err:
            return subprocess.Popen(
                [*inside, *whole],
                env=environment(self.config),
                stdout=subprocess.DEVNULL,
                stderr=err,
                text=True,
            )

    def said(self) -> str:
        return (self.folder / "stderr").read_text()[-3000:]

    def end(self, process: subprocess.Popen[str], expect: int | None = 0) -> int:
        """Wait for the end of the process, and return its exit code. expect: the required exit
        code; None means any exit code except 0."""
        code = process.wait(timeout=_END_SECONDS)
        assert code != 0 if expect is None else code == expect, f"{code}: {self.said()}"
        self.assert_nothing_is_left()
        return code

    def to_the_end(self, *words: str, run: Path | None = None) -> None:
        self.end(self.start(*words, run=run))

    def processes(self) -> list[psutil.Process]:
        """All processes of runs with this configuration, whoever started them."""
        mine = []
        for process in psutil.process_iter():
            try:
                is_mine = str(self.folder) in process.environ().get("PYTHONPATH", "")
                if is_mine and process.status() != psutil.STATUS_ZOMBIE:
                    mine.append(process)
            except psutil.Error:
                continue
        return mine

    def ranks(self, process: subprocess.Popen[str], count: int) -> list[psutil.Process]:
        """Wait until all ranks have started. Returns them in the order of their numbers."""
        found: dict[int, psutil.Process] = {}

        def are_all_there() -> bool:
            for child in psutil.Process(process.pid).children():
                try:
                    found[int(child.environ()["RANK"])] = child
                except (psutil.Error, KeyError):
                    continue
            return len(found) == count

        assert wait_until(are_all_there, process), self.said()
        return [found[number] for number in range(count)]

    def assert_nothing_is_left(self) -> None:
        deadline = time.monotonic() + 120
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert left == []
        assert list(self.memory.iterdir()) == [], "files in memory"

    def steps(self) -> int:
        file = self.run / "metrics.jsonl"
        return file.read_bytes().count(b"\n") if file.exists() else 0

    def assert_as_undisturbed(self) -> None:
        assert_same_run(self.run, self.undisturbed, LAST)
        steps = [record["step"] for record in all_records(self.run)]
        assert steps == list(range(STEPS + 1))  # step 0 is the evaluation before the first step
        assert not [name for name in checkpoint_names(self.run) if name.startswith(".")]


@pytest.fixture
def runs(config_file: Path) -> Iterator[Runs]:
    section = {"interval": 1, "keep_last": 2}
    found = Runs(make_small(config_file, training={"steps": STEPS}, checkpoint=section))
    yield found
    for process in found.processes():
        process.kill()


@pytest.fixture
def own_memory(runs: Runs) -> list[str]:
    """The first words of a command line. For the command that follows these words, the folder
    `runs.memory` takes the place of /dev/shm."""
    return [*_IN_A_NAMESPACE, _OWN_MEMORY, str(runs.memory)] if may_mount() else []


def test_a_rank_that_stands_still_for_a_while_delays_the_run_only(
    runs: Runs, own_memory: list[str]
) -> None:
    """A rank may be paused, for example with its machine. This only delays the run, because the
    other ranks wait."""
    runs.to_the_end(TWO, run=runs.undisturbed)
    process = runs.start(TWO, inside=own_memory)
    _, second = runs.ranks(process, 2)
    wait_until(lambda: runs.steps() >= 2, process)
    second.send_signal(signal.SIGSTOP)
    time.sleep(10)
    assert process.poll() is None and runs.steps() < STEPS
    second.send_signal(signal.SIGCONT)
    runs.end(process)
    runs.assert_as_undisturbed()


# Trains on a file system of a given size, then makes it larger and trains again. At the end copies
# the files of the run.
_SMALL_DISK = """
mount -t tmpfs -o size={size}k tmpfs {disk}
code=0; {train} >{folder}/full_stdout 2>{folder}/full_stderr || code=$?
echo $code >{folder}/code
mount -o remount,size=1g {disk}
{train} >{folder}/more_stdout 2>{folder}/more_stderr
cp -a {disk}/run {copy}
"""


@needs_mounts
@pytest.mark.parametrize("checkpoints", [0.5, 1.5, 3.4])
def test_a_run_on_a_disk_that_fills_up_ends_with_the_reason_and_goes_on_with_more_room(
    runs: Runs, checkpoints: float
) -> None:
    """checkpoints: the number of checkpoints for which the disk has room. Three checkpoints exist
    at a time, because the oldest is removed last. If three fit, only metrics and samples may run
    out of space."""
    runs.to_the_end(TWO, run=runs.undisturbed)
    saved = runs.undisturbed / "checkpoints" / LAST
    size = sum(path.stat().st_size for path in saved.rglob("*") if path.is_file())
    disk = runs.folder / "disk"
    disk.mkdir()
    words = command(runs.config, f"logging.dir={disk / 'run'}", TWO)
    script = _SMALL_DISK.format(
        size=int(size * checkpoints / 1024),
        disk=disk,
        train=" ".join(words),
        folder=runs.folder,
        copy=runs.run,
    )
    done = subprocess.run(
        [*_IN_A_NAMESPACE, script], env=environment(runs.config), check=False, timeout=600
    )
    first = (runs.folder / "full_stderr").read_text()
    code = int((runs.folder / "code").read_text())
    assert done.returncode == 0, first + (runs.folder / "more_stderr").read_text()
    assert code in (0, 2), first[-3000:]
    assert "Traceback" not in first, first[-3000:]
    told = first + (runs.folder / "full_stdout").read_text()
    if checkpoints < 3:
        assert code == 2 and "bytes, and " in told and " are free" in told, told[-3000:]
    runs.assert_nothing_is_left()
    runs.assert_as_undisturbed()


def test_a_clock_that_is_set_back_changes_nothing(runs: Runs, own_memory: list[str]) -> None:
    """The clock is set back by an hour during a run, which is then resumed. Measured times do not
    depend on the clock, and the newest checkpoint is that of the latest step."""
    runs.to_the_end(TWO, run=runs.undisturbed)
    (runs.folder / "sitecustomize.py").write_text(_CLOCK)
    process = runs.start(TWO, inside=own_memory)
    wait_until(lambda: runs.steps() >= 3, process)
    (runs.folder / "set_back").touch()
    wait_until(lambda: runs.steps() >= 5, process)
    if process.poll() is None:
        process.kill()
    process.wait()
    runs.assert_nothing_is_left()
    runs.to_the_end(TWO)
    runs.assert_as_undisturbed()
    for record in all_records(runs.run):
        negative = {k: v for k, v in record.items() if k.startswith("perf/") and v < 0}
        assert not negative


def test_the_clock_of_a_run_is_the_one_that_is_set_back(runs: Runs) -> None:
    """This checks that the clock in the test above is really set back."""
    (runs.folder / "sitecustomize.py").write_text(_CLOCK)
    (runs.folder / "set_back").touch()
    program = "import time, os; print(os.environ['PYTHONPATH'] and time.time())"
    environ = environment(runs.config)
    told = subprocess.run(
        [sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True
    )
    assert time.time() - float(told.stdout) > 3000
