"""The batch script that users submit, on two nodes of a real Slurm cluster."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from gspo_megatron.process.ranks import first_host
from tests.programs import ROOT
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import (
    CALLS_PER_STEP,
    Disturbance,
    Run,
    disturb,
    find_task,
    first_node_failed,
    killed_late,
    make_run,
    node_failed,
    preempted,
    requeued,
    second_node_killed_late,
    signalled,
    wait_for_line,
)

# The tests start many processes, each of which may take a minute on a busy machine.
pytestmark = pytest.mark.timeout(1200)

IN_STEP_2 = CALLS_PER_STEP + 5  # the number of a call of the reward


def finish_as(cluster: Cluster, run: Run, number: str, undisturbed: Run) -> str:
    """Check that the job is COMPLETED with the results of the undisturbed run. Returns its log."""
    log = cluster.ended(number, "COMPLETED 0:0")
    run.assert_same_as(undisturbed)
    assert not list(run.folder.glob(".gspo-megatron*"))
    return log


def lines_of(task: int, log: str) -> list[str]:
    """The lines that one task printed."""
    return [line for line in log.splitlines() if line.startswith(f"{task}: ")]


@pytest.mark.parametrize(
    "everything",
    [
        [preempted, node_failed, second_node_killed_late],
        pytest.param(
            [preempted, node_failed, killed_late, second_node_killed_late, requeued],
            marks=pytest.mark.full,
        ),
    ],
    ids=len,
)
def test_a_run_that_everything_happens_to_ends_as_the_one_that_nothing_happened_to(
    cluster: Cluster, tmp_path: Path, undisturbed: Run, everything: list[Disturbance]
) -> None:
    # Half of the disturbances happen at the same checkpoint, and late signals of Slurm itself may
    # add restarts. So the limit is high.
    run = make_run(tmp_path, training={"max_restarts_without_progress": 20})
    # Slurm also sends SIGUSR1 when it preempts a job. The signal alone is in test_stages.
    number = run.submit_held(cluster, IN_STEP_2)
    for disturbance in everything:
        disturb(cluster, run, number, disturbance)
        if disturbance is not everything[-1]:
            run.hold((run.folder / "calls").stat().st_size + 3)
    log = finish_as(cluster, run, number, undisturbed)
    for restart in range(1 + len(everything)):
        assert f"slurm: job {number}, restart {restart}: 2 tasks on 2 nodes" in log
    assert "stopped as asked" in log
    kills = {killed_late, second_node_killed_late} & {*everything}
    assert log.count("killed from outside") >= len(kills)
    environment = json.loads((run.out / "environment.json").read_text())
    # Late signals of Slurm itself may cause further restarts.
    assert int(environment["slurm"]["restarts"]) >= len(everything)


@pytest.mark.full
@pytest.mark.parametrize(
    "disturbance", [signalled, preempted, node_failed, first_node_failed, requeued]
)
def test_each_disturbance_by_itself(
    cluster: Cluster, run: Run, undisturbed: Run, disturbance: Disturbance
) -> None:
    number = run.submit_held(cluster, IN_STEP_2)
    disturb(cluster, run, number, disturbance)
    finish_as(cluster, run, number, undisturbed)


def test_a_run_is_saved_before_its_time_is_over_without_any_signal(
    cluster: Cluster, tmp_path: Path, undisturbed: Run
) -> None:
    # The time limit of the first start is 600 s. It is shorter than the margin of 700 s for a stop,
    # so the run stops as soon as it can.
    run = make_run(tmp_path, training={"stop_margin_seconds": 700})
    number = run.submit(cluster, options=["--time=10", "--signal=B:USR1@1"])
    cluster.wait(number, lambda job: job["Restarts"] == "1")
    cluster.run("scontrol", "update", f"JobId={number}", "TimeLimit=60")
    log = finish_as(cluster, run, number, undisturbed)
    assert f"Slurm job {number}, restart 0: " in log
    assert "s left, and a stop may take" in log


@pytest.mark.full
def test_a_run_is_saved_by_the_signal_before_its_time_is_over(
    cluster: Cluster, tmp_path: Path, undisturbed: Run
) -> None:
    run = make_run(tmp_path, training={"stop_margin_seconds": 0})
    run.hold(IN_STEP_2)
    # With a time limit of two minutes, Slurm sends the signal after at most one minute.
    number = run.submit(cluster, options=["--time=2", "--signal=B:USR1@60"])
    wait_for_line(cluster, number, "told to stop")
    run.let_go()
    cluster.wait(number, lambda job: job["Restarts"] == "1")
    cluster.run("scontrol", "update", f"JobId={number}", "TimeLimit=60")
    finish_as(cluster, run, number, undisturbed)


def test_a_rank_that_fails_ends_the_job_with_its_traceback(cluster: Cluster, run: Run) -> None:
    number = run.submit_held(cluster, IN_STEP_2)
    (run.folder / "fail").write_text("1")
    since = time.monotonic()
    run.let_go()
    log = cluster.ended(number, "FAILED 1:0")
    # The other ranks would wait for half an hour if the job did not end them.
    assert time.monotonic() - since < 120
    assert cluster.restarts(number) == 0
    traceback = lines_of(1, log)
    assert any("ArithmeticError: a failure made for the test" in line for line in traceback)
    assert any("slurm_test_reward.py" in line for line in traceback)
    assert "failed with exit code 1, first in task " in log


@pytest.mark.full
def test_a_cancelled_job_does_not_come_back(cluster: Cluster, run: Run) -> None:
    number = run.submit_held(cluster, IN_STEP_2)
    cluster.run("scancel", number)
    run.let_go()
    job = cluster.finish(number)
    assert (job["JobState"], job["Restarts"]) == ("CANCELLED", "0")
    time.sleep(3)  # a script that requeued the job would have done so in this time
    assert cluster.job(number)["JobState"] == "CANCELLED"


def test_a_rank_that_stands_still_ends_the_job_and_all_tell_where_they_were(
    cluster: Cluster, tmp_path: Path
) -> None:
    run = make_run(tmp_path, training={"hang_timeout_seconds": 12})
    number = run.submit_held(cluster, IN_STEP_2)
    stopped = find_task(run, rank=1)
    os.kill(stopped, signal.SIGSTOP)
    run.let_go()
    log = cluster.ended(number, "FAILED 70:0")
    stacks = (run.out / "hang" / "rank_00000.txt").read_text()
    assert stacks.startswith("rank 0 on ") and "run_training" in stacks
    assert "0: rank 0 on " in log and "no stacks from rank 1:" in log


def test_a_wrong_configuration_is_refused_before_any_task_starts(
    cluster: Cluster, run: Run
) -> None:
    checked = run.submit(cluster, "--check-only")
    # 2 tasks cannot form 3 pipeline stages.
    refused = run.submit(cluster, "parallel.layout=pp=3")
    logs = cluster.ended(checked, "COMPLETED 0:0"), cluster.ended(refused, "FAILED 2:0")
    assert not any(lines_of(0, log) for log in logs)
    assert "pp" in logs[1] and "Traceback" not in logs[1]
    assert not run.out.exists()


def test_a_job_that_never_gets_further_gives_up(cluster: Cluster, tmp_path: Path) -> None:
    run = make_run(tmp_path, training={"max_restarts_without_progress": 0})
    number = run.submit(cluster)
    cluster.wait(number, lambda job: job["JobState"] == "RUNNING")
    cluster.run("scontrol", "requeue", number)
    log = cluster.ended(number, "FAILED 2:0")
    assert "restarted 1 times before its first checkpoint" in log
    assert cluster.restarts(number) == 1


@pytest.mark.parametrize(
    "nodes", ["a", "n[07-08,12],b", "r[1-2]n[03,05-06]", "127.0.0.[11-12]", "x[3,5-9],y[1-2]"]
)
def test_the_first_node_is_the_one_that_scontrol_says(shared_cluster: Cluster, nodes: str) -> None:
    expanded = shared_cluster.run("scontrol", "show", "hostnames", nodes)
    assert first_host(nodes) == expanded.split()[0]


_TORCHRUN = """#!/bin/bash
srun --ntasks-per-node=1 bash -c '"$GSPO_PYTHON" -m torch.distributed.run --nproc-per-node 1 \\
    --nnodes "$SLURM_JOB_NUM_NODES" --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" \\
    --rdzv-endpoint "$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1):29400" \\
    "$0/pretrain_scripts/train_gspo.py" "$1"' "$@"
"""


@pytest.mark.full
def test_torchrun_as_the_readme_has_it(cluster: Cluster, run: Run, undisturbed: Run) -> None:
    script = run.folder / "torchrun.sh"
    script.write_text(_TORCHRUN)
    options = ["--nodes=2", "--ntasks-per-node=1", f"--output={run.folder}/log"]
    environ = run.environ(cluster)
    number = cluster.submit(script, ROOT, run.config, options=options, **environ)
    finish_as(cluster, run, number, undisturbed)
