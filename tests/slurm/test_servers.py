"""A job of two nodes. The last node runs real vLLM servers for the rollouts, while two tasks train
on the first node."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest

from tests.e2e.resuming import TINY_MODEL, records
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import (
    CALLS_PER_STEP,
    STEPS,
    Disturbance,
    Run,
    disturb,
    make_run,
    node_failed,
    requeued,
    signalled,
    wait_for_line,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

PROBE_SECONDS = 5


@pytest.fixture
def served(tmp_path: Path, vllm_python: Path) -> Run:
    """A run with one server that generates one step ahead. The run will be held in step 2."""
    run = make_run(
        tmp_path,
        ranks=4,  # the ranks of two nodes; as servers use the second node, only two ranks train
        # the smallest size that vLLM's kernels support
        model={"megatron": {**TINY_MODEL, "kv_channels": 32}},
        parallel={"layout": "dp=2,ep=2"},
        rollout={
            "engine": "vllm",
            "max_staleness": 1,
            "vllm": {"servers": 1, "python": str(vllm_python), "restarts": 1},
        },
    )
    run.hold(CALLS_PER_STEP + 5)  # held in this call of the reward
    return run


def submit(run: Run, cluster: Cluster) -> str:
    environ = {"GSPO_PROBE_SECONDS": str(PROBE_SECONDS)}
    return run.submit(cluster, "--rollout-nodes", "1", **environ)


def finish(cluster: Cluster, run: Run, number: str) -> str:
    """Check that the job is COMPLETED, that every step was trained once, that no response is too
    old, and that no process is left. Returns the job's log."""
    log = cluster.ended(number, "COMPLETED 0:0", timeout=600)
    steps = [record for record in records(run.out) if record["phase"] == "rl" and record["step"]]
    assert [record["step"] for record in steps] == list(range(1, STEPS + 1))
    for record in steps:
        assert record["staleness/max"] <= 1 and record["sync/version"] == record["step"]
        # If the current weights generated all tokens, log-probs of trainer and server agree in
        # float32, although their kernels differ.
        assert record["staleness/max"] or record["mismatch/abs_mean"] <= 1e-5
    assert_nothing_runs(run)
    assert not list(run.folder.glob(".gspo-megatron*"))
    return log


def assert_nothing_runs(run: Run) -> None:
    deadline = time.monotonic() + 120
    while left := processes(run):
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


def processes(run: Run) -> list[str]:
    """The command lines of agents, servers and ranks, which contain the folder of the run."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        words = " ".join(process.info["cmdline"] or ())
        if str(run.folder) in words and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(words)
    return found


@pytest.mark.parametrize(
    "disturbances",
    # test_stages sends the signal to a job, and below a job with servers is requeued. In
    # tests/vllm/test_faults.py the signal saves a run with servers.
    [[], pytest.param([signalled, requeued], marks=pytest.mark.full)],
    ids=len,
)
def test_servers_on_a_node_of_their_own_through_signals_and_requeues(
    isolated_cluster: Cluster, served: Run, disturbances: list[Disturbance]
) -> None:
    """During the last start the agent is killed. It is started again, and the job continues."""
    cluster, second = isolated_cluster, isolated_cluster.nodes[1]
    number, starts = submit(served, cluster), 1 + len(disturbances)
    for disturbance in disturbances:
        disturb(cluster, served, number, disturbance)
        served.hold((served.folder / "calls").stat().st_size + 1)
    served.wait_until_held(cluster, number)
    [agent] = [p for p in psutil.process_iter(["cmdline"]) if is_agent(p, served)]
    agent.kill()
    wait_for_line(cluster, number, f"the agent on {second} has ended: starting it again")
    served.let_go()
    log = finish(cluster, served, number)
    assert log.count(f"2 tasks on 1 nodes; rollout servers on {second}") == starts
    assert log.count(f"{second}: server 0 started at http://{second}:") >= starts + 1
    assert ("stopped as asked" in log) == (signalled in disturbances)
    assert cluster.restarts(number) == len(disturbances)


def is_agent(process: psutil.Process, run: Run) -> bool:
    words = process.info["cmdline"] or []
    return words[1:5] == ["-m", "gspo_megatron", "serve", "--join"] and str(run.config) in words


@pytest.mark.full  # the test below, which is not `full`, also kills the node of the servers
def test_the_node_of_the_servers_is_lost(cluster: Cluster, served: Run) -> None:
    lose_the_servers(cluster, served, submit(served, cluster))


def test_the_second_component_of_a_heterogeneous_job_serves(cluster: Cluster, served: Run) -> None:
    """If the node of the second component is lost, the whole job is requeued."""
    options = ["--nodes=1", ":", "--nodes=1", "--exclusive"]
    number = served.submit(cluster, options=options, GSPO_PROBE_SECONDS=str(PROBE_SECONDS))
    log = lose_the_servers(cluster, served, number)
    second = cluster.nodes[1]
    assert log.count(f"2 tasks on 1 nodes; rollout servers on {second}") == 2
    assert f"{second}: server 0 started at http://" in log


def lose_the_servers(cluster: Cluster, run: Run, number: str) -> str:
    """Kill the node of the servers, and wait until the job has been restarted. Returns its log."""
    run.wait_until_held(cluster, number)
    since = time.monotonic()
    node_failed(cluster, run, number)
    # The job restarts once, after 30 s without a sign of life from the agent.
    assert time.monotonic() - since < 30 + PROBE_SECONDS + 180
    log = finish(cluster, run, number)
    second = cluster.nodes[1]
    assert f"server 0 on {second}: there is no sign of life from {second} for " in log
    assert "a node of the job does not answer: the run continues from its last checkpoint" in log
    return log
