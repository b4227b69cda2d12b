"""A run that is killed at random moments. It resumes, and ends as if it had never been killed."""

from __future__ import annotations

import random
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.e2e.resuming import assert_same_run, checkpoint_names, make_small, start, train
from tests.programs import Process, wait_until

STEPS = 12
LAST = f"rl_{STEPS:08d}"
KILLS = 3
MANY_KILLS = 50  # the number of kills for each layout
EARLY = 3  # every third kill comes while the run is starting


def kill_one(process: Process, chance: random.Random) -> None:
    """Kill one rank, or all ranks by killing their launcher, with SIGKILL."""
    ranks = psutil.Process(process.pid).children()
    if ranks and chance.random() < 0.5:
        chance.choice(ranks).kill()
    else:
        process.kill()
    process.wait(timeout=60)
    psutil.wait_procs(ranks, timeout=60)
    assert not any(rank.is_running() for rank in ranks)


@dataclass
class Killer:
    """Starts a run again and again, and kills it."""

    config: Path
    run: Path
    words: tuple[str, ...]
    chance: random.Random
    launch_seconds: float = 0.0  # the longest time so far from a start to the first metrics

    def start(self, run: Path) -> Process:
        return start(self.config, f"logging.dir={run}", *self.words)

    def assert_well(self, process: Process) -> None:
        assert process.returncode == 0, (self.config.parent / "stderr").read_text()[-3000:]

    def let_run(self, run: Path) -> None:
        """Let the run end undisturbed."""
        process = self.start(run)
        self.await_figures(run, process)
        process.wait(timeout=240)
        self.assert_well(process)

    def await_figures(self, run: Path, process: Process) -> None:
        """Wait until a process that has just started writes metrics, or ends."""
        begin, file = time.monotonic(), run / "metrics.jsonl"
        seen = file.read_bytes() if file.exists() else b""
        if wait_until(lambda: file.exists() and file.read_bytes() not in (seen, b""), process):
            self.launch_seconds = max(self.launch_seconds, time.monotonic() - begin)

    def kill(self, *, early: bool) -> bool:
        """Start or resume the run, and kill it at a random moment. With `early`, the moment is
        during the start, while new processes look for a checkpoint and read it. Otherwise the
        moment is later, so that the run makes progress. Returns True if the run was killed, and
        False if it had ended before."""
        process = self.start(self.run)
        if early:
            until = time.monotonic() + self.chance.uniform(0, self.launch_seconds)
            wait_until(lambda: time.monotonic() >= until, process)
        else:
            self._await_a_moment(process)
        if process.poll() is None:
            kill_one(process, self.chance)
            return True
        self.assert_well(process)
        return False

    def _await_a_moment(self, process: Process) -> None:
        folder, metrics, chance = self.run / "checkpoints", self.run / "metrics.jsonl", self.chance

        def lines() -> int:
            return metrics.read_bytes().count(b"\n") if metrics.exists() else 0

        self.await_figures(self.run, process)
        # Some steps must pass, or no run would make progress.
        enough = lines() + chance.randrange(4)
        wait_until(lambda: lines() >= enough, process)
        time.sleep(chance.uniform(0, 0.3))
        if chance.random() < 0.5:  # the kill comes during a save
            wait_until(lambda: any(folder.glob(".partial-*")), process)
            time.sleep(chance.uniform(0, 0.03))

    def remove_moved(self) -> None:
        """Remove the folders of runs that were killed before their first checkpoint. A new start
        has given these folders other names."""
        for moved in self.run.parent.glob(f"{self.run.name}.*"):
            assert not any(moved.glob("checkpoints/.partial-*")), "no one would ever remove it"
            shutil.rmtree(moved)


def kill_again_and_again(config: Path, kills: int, *words: str) -> None:
    undisturbed, run = config.parent / "undisturbed", config.parent / "killed"
    killer = Killer(config, run, words, random.Random(kills + len(words)))
    killer.let_run(undisturbed)
    done = 0
    while done < kills:
        killed = killer.kill(early=done % EARLY == 1)
        done += killed
        killer.remove_moved()
        if not killed:  # the run ended before the kill, so a new run begins
            assert_same_run(run, undisturbed, LAST)
            shutil.rmtree(run)
    train(config, f"logging.dir={run}", *words)
    killer.remove_moved()
    assert_same_run(run, undisturbed, LAST)
    left = [name for name in checkpoint_names(run) if name.startswith(".")]
    assert left == []


def crashing(config_file: Path, **checkpoint: object) -> Path:
    return make_small(
        config_file,
        training={"steps": STEPS},
        checkpoint={"interval": 1, "keep_last": 2, **checkpoint},
        # The reference policy has the first weights of RL, which must survive every kill.
        objective={"kl": "k3", "kl_coefficient": 0.05},
    )


def test_a_run_that_is_killed_again_and_again_ends_as_the_one_that_was_not(
    config_file: Path,
) -> None:
    config = crashing(config_file, asynchronous=True)
    kill_again_and_again(config, KILLS, "parallel.layout=dp=2,ep=2")


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("layout", "asynchronous"),
    [("tp=1", False), ("dp=2,ep=2", True), ("tp=2,pp=2,ep=2", False)],
)
def test_the_same_with_many_kills(config_file: Path, layout: str, asynchronous: bool) -> None:
    config = crashing(config_file, asynchronous=asynchronous)
    kill_again_and_again(config, MANY_KILLS, f"parallel.layout={layout}")
