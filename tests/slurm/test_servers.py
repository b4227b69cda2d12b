"""A job whose last node serves the rollouts: real vLLM servers, two tasks on the first node."""

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
    Run,
    disturb,
    make_run,
    node_failed,
    requeued,
    signalled,
    wait_for_line,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

IN_STEP_2 = CALLS_PER_STEP + 5  # calls of the reward
PROBE_SECONDS = 5
drawing_ahead = pytest.mark.parametrize("served", [1], indirect=True)


@pytest.fixture
def served(tmp_path: Path, vllm_python: Path, request: pytest.FixtureRequest) -> Run:
    """A run with one server, which draws nothing ahead unless a parameter says so."""
    return make_run(
        tmp_path,
        model={"megatron": {**TINY_MODEL, "kv_channels": 32}},  # the least that vLLM's kernels take
        parallel={"layout": "dp=2,ep=2"},
        rollout={
            "engine": "vllm",
            "max_staleness": getattr(request, "param", 0),
            "vllm": {"servers": 1, "python": str(vllm_python), "restarts": 1},
        },
    )


def submit(run: Run, cluster: Cluster) -> str:
    environ = {"GSPO_PROBE_SECONDS": str(PROBE_SECONDS)}
    return run.submit(cluster, "--rollout-nodes", "1", **environ)


def finish(cluster: Cluster, run: Run, number: str) -> str:
    """The job's log, once it is COMPLETED: every step was trained once, on responses that miss no
    more updates than allowed, and nothing of it runs any more."""
    log = cluster.ended(number, "COMPLETED 0:0", timeout=600)
    steps = [record for record in records(run.out) if record["phase"] == "rl" and record["step"]]
    assert [record["step"] for record in steps] == list(range(1, STEPS + 1))
    for record in steps:
        assert record["staleness/max"] <= 1 and record["sync/version"] == record["step"]
        # the same weights: float32 on both sides, of other kernels
        assert record["staleness/max"] or record["mismatch/abs_mean"] <= 1e-5
    assert_nothing_runs(run)
    assert not list(run.folder.glob(".gspo-megatron*"))
    return log


def assert_nothing_runs(run: Run) -> None:
    deadline = time.monotonic() + 20
    while left := processes(run):
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


def processes(run: Run) -> list[str]:
    """The command lines of agents, servers and ranks: their words name the run's folder."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        words = " ".join(process.info["cmdline"] or ())
        if str(run.folder) in words and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(words)
    return found


@drawing_ahead
def test_servers_on_a_node_of_their_own_through_signals_and_requeues(
    isolated_cluster: Cluster, served: Run
) -> None:
    served.hold(IN_STEP_2)
    number = submit(served, isolated_cluster)
    disturb(isolated_cluster, served, number, signalled)
    served.hold((served.folder / "calls").stat().st_size + 3)
    disturb(isolated_cluster, served, number, requeued)
    log = finish(isolated_cluster, served, number)
    second = isolated_cluster.nodes[1]
    assert log.count(f"2 tasks on 1 nodes; rollout servers on {second}") == 3
    assert f"{second}: server 0 started at http://{second}:" in log
    assert "stopped as asked" in log


@drawing_ahead
def test_the_node_of_the_servers_is_lost(cluster: Cluster, served: Run) -> None:
    served.hold(IN_STEP_2)
    number = submit(served, cluster)
    served.wait_until_held(cluster, number)
    since = time.monotonic()
    node_failed(cluster, served, number)
    # one restart, whose agent is silent for 30 s
    assert time.monotonic() - since < 30 + PROBE_SECONDS + 60
    log = finish(cluster, served, number)
    second = cluster.nodes[1]
    assert f"server 0 on {second}: there is no sign of life from {second} for " in log
    assert "a node of the job does not answer: the run continues from its last checkpoint" in log


def test_an_agent_that_dies_is_started_again(cluster: Cluster, served: Run) -> None:
    served.hold(IN_STEP_2)
    number = submit(served, cluster)
    served.wait_until_held(cluster, number)
    [agent] = [p for p in psutil.process_iter(["cmdline"]) if is_agent(p, served)]
    agent.kill()
    second = cluster.nodes[1]
    wait_for_line(cluster, number, f"the agent on {second} has ended: starting it again")
    served.let_go()
    log = finish(cluster, served, number)
    assert log.count(f"{second}: server 0 started at ") >= 2
    assert cluster.restarts(number) == 0


def is_agent(process: psutil.Process, run: Run) -> bool:
    words = process.info["cmdline"] or []
    return words[1:5] == ["-m", "gspo_megatron", "serve", "--join"] and str(run.config) in words


def test_the_second_component_of_a_heterogeneous_job_serves(cluster: Cluster, served: Run) -> None:
    """The whole job is requeued once the node of this component is lost."""
    served.hold(IN_STEP_2)
    second = ["--nodes=1", ":", "--nodes=1", "--exclusive"]
    number = served.submit(cluster, options=second, GSPO_PROBE_SECONDS=str(PROBE_SECONDS))
    disturb(cluster, served, number, node_failed)
    log = finish(cluster, served, number)
    node = cluster.nodes[1]
    assert log.count(f"2 tasks on 1 nodes; rollout servers on {node}") == 2
    assert f"{node}: server 0 started at http://" in log
    assert "a node of the job does not answer: the run continues from its last checkpoint" in log


def test_components_that_nothing_runs_on_are_refused(cluster: Cluster, small: Run) -> None:
    usual = ["--nodes=1", ":", "--nodes=1", "--exclusive"]
    number = small.submit(cluster, "--rollout-nodes=1", options=usual)
    log = cluster.ended(number, "FAILED 2:0")
    assert "a heterogeneous job of 2 components: legal: 2, in train_gspo.sbatch, without" in log


def test_servers_that_do_not_spread_over_the_nodes(cluster: Cluster, small: Run) -> None:
    number = small.submit(cluster, "--rollout-nodes=1")
    log = cluster.ended(number, "FAILED 2:0")
    assert "rollout.engine = 'megatron': nothing runs on the nodes of GSPO_ROLLOUT_NODES" in log
    number = small.submit(cluster, "--rollout-nodes", "2")
    log = cluster.ended(number, "FAILED 2:0")
    assert "--rollout-nodes 2: legal in train_gspo.sbatch: less than the 2 nodes of the job" in log
