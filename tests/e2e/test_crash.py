"""Killed at any moment, a run resumes, and ends as if it had never been killed."""

from __future__ import annotations

import random
import shutil
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests.e2e.resuming import (
    assert_same_run,
    checkpoint_names,
    make_small,
    start,
    train,
    wait_for,
)

STEPS = 12
LAST = f"rl_{STEPS:08d}"
KILLS = 4
MANY_KILLS = 50  # of either layout


def kill_one(process: subprocess.Popen[str], chance: random.Random) -> None:
    """SIGKILL a rank, or all at once by way of their launcher, which they do not outlive."""
    ranks = psutil.Process(process.pid).children()
    if ranks and chance.random() < 0.5:
        chance.choice(ranks).kill()
    else:
        process.kill()
    process.wait(timeout=60)
    psutil.wait_procs(ranks, timeout=60)
    assert not any(rank.is_running() for rank in ranks)


def run_until_killed(config: Path, run: Path, chance: random.Random, *words: str) -> bool:
    """Start the run, or go on with it, and kill it at some moment. Returns whether it was killed;
    otherwise it has ended."""
    folder, metrics = run / "checkpoints", run / "metrics.jsonl"

    def lines() -> int:
        return metrics.read_bytes().count(b"\n") if metrics.exists() else 0

    process = start(config, f"logging.dir={run}", *words)
    seen = metrics.read_bytes() if metrics.exists() else b""
    wait_for(lambda: metrics.exists() and metrics.read_bytes() != seen, process)
    enough = lines() + chance.randrange(4)  # or else no run would come far
    wait_for(lambda: lines() >= enough, process)
    time.sleep(chance.uniform(0, 0.3))
    if chance.random() < 0.5:  # inside a save
        wait_for(lambda: any(folder.glob(".partial-*")), process)
        time.sleep(chance.uniform(0, 0.03))
    if process.poll() is None:
        kill_one(process, chance)
        return True
    assert process.returncode == 0, (config.parent / "stderr").read_text()[-3000:]
    return False


def kill_again_and_again(config: Path, kills: int, *words: str) -> None:
    undisturbed, run = config.parent / "undisturbed", config.parent / "killed"
    train(config, f"logging.dir={undisturbed}", *words)
    chance = random.Random(kills + len(words))
    done = 0
    while done < kills:
        killed = run_until_killed(config, run, chance, *words)
        done += killed
        if not killed:  # it came to its end: the next one begins
            assert_same_run(run, undisturbed, LAST)
            shutil.rmtree(run)
    train(config, f"logging.dir={run}", *words)
    assert_same_run(run, undisturbed, LAST)
    left = [name for name in checkpoint_names(run) if name.startswith(".")]
    assert left == []


def crashing(config_file: Path, **checkpoint: object) -> Path:
    return make_small(
        config_file,
        training={"steps": STEPS},
        checkpoint={"interval": 1, "keep_last": 2, **checkpoint},
        # a reference policy too: the weights that RL started from have to outlive every kill
        objective={"kl": "k3", "kl_coefficient": 0.05},
    )


LAYOUTS = [("tp=1", False), ("dp=2,ep=2", True)]


@pytest.mark.parametrize(("layout", "asynchronous"), LAYOUTS)
def test_a_run_that_is_killed_again_and_again_ends_as_the_one_that_was_not(
    config_file: Path, layout: str, asynchronous: bool
) -> None:
    config = crashing(config_file, asynchronous=asynchronous)
    kill_again_and_again(config, KILLS // 2, f"parallel.layout={layout}")


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("layout", "asynchronous"), [*LAYOUTS, ("tp=2,pp=2,ep=2", False)])
def test_the_same_with_many_kills(config_file: Path, layout: str, asynchronous: bool) -> None:
    config = crashing(config_file, asynchronous=asynchronous)
    kill_again_and_again(config, MANY_KILLS, f"parallel.layout={layout}")
