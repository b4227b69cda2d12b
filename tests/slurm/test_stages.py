"""sft.sbatch and pretrain.sbatch, on two nodes of a real Slurm cluster."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.e2e.resuming import assert_same_run, records
from tests.programs import wait_until
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import (
    STAGE_STEPS,
    Run,
    find_task,
    make_stage_run,
    signalled,
)

# The test starts many processes, which take minutes on a busy machine.
pytestmark = pytest.mark.timeout(1200)


def completed(cluster: Cluster, run: Run, number: str) -> str:
    """Check that the job is COMPLETED with a record of every step. Returns its log."""
    log = cluster.ended(number, "COMPLETED 0:0", timeout=600)
    steps = [(record["phase"], record["step"]) for record in records(run.out)]
    assert steps == [(run.script, step) for step in range(1, STAGE_STEPS + 1)]
    slurm = json.loads((run.out / "environment.json").read_text())["slurm"]
    assert (slurm["nodes"], slurm.get("restarts", "0")) == ("2", str(cluster.restarts(number)))
    assert not list(run.folder.glob(".gspo-megatron*"))
    return log


def stop(cluster: Cluster, run: Run, number: str) -> None:
    """Send SIGUSR1 to the batch script in the middle of the run. One rank is frozen until Slurm has
    sent the signal, and the others wait for this rank."""
    wait_until((run.out / "metrics.jsonl").exists, seconds=600)
    frozen = find_task(run, rank=1)
    os.kill(frozen, signal.SIGSTOP)
    try:
        signalled(cluster, run, number)
    finally:
        os.kill(frozen, signal.SIGCONT)
    cluster.wait(number, lambda job: job["Restarts"] == "1")
    assert 1 <= len(records(run.out)) < STAGE_STEPS


def test_pretraining_that_is_stopped_ends_as_it_would_have_and_fine_tuning_takes_it_on(
    cluster: Cluster, tmp_path: Path
) -> None:
    stopped, other = (make_stage_run(tmp_path / name, "pretrain") for name in ("a", "b"))
    number, undisturbed = stopped.submit(cluster), other.submit(cluster)
    stop(cluster, stopped, number)
    completed(cluster, other, undisturbed)
    tuned = make_stage_run(tmp_path / "c", "sft")
    tuning = tuned.submit(cluster, f"model.checkpoint_path={other.out}")
    log = completed(cluster, stopped, number)
    assert f"Slurm job {number}, restart 1" in log and "stopped as asked" in log
    assert_same_run(stopped.out, other.out, f"pretrain_{STAGE_STEPS:08d}")
    assert str(other.out) in completed(cluster, tuned, tuning)
