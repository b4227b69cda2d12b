"""The manifests of deploy/. Network namespaces take the place of pods, with the variables that
Kubernetes, Kubeflow and SkyPilot set. The tests need neither Slurm nor Ray."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from gspo_megatron.process.failures import LOST_PEER, STOPPED
from tests.e2e.resuming import TINY_MODEL, records
from tests.pods import Pod, Pods, containers, network
from tests.programs import ROOT, gspo, wait_until
from tests.slurm.jobs import CALLS_PER_STEP, STEPS, Run, make_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

IN_STEP_2 = CALLS_PER_STEP + 5  # the number of a reward call in step 2


def manifest() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "deploy/kubernetes/jobset.yaml").read_text(encoding="utf-8"))


def program(words: list[str]) -> list[str]:
    assert words[0] == "gspo-megatron"
    return [sys.executable, "-m", "gspo_megatron", *words[1:]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return make_run(tmp_path)


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Pods]:
    with network(tmp_path) as made:
        yield made


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run of the pods, made on one machine without any disturbance."""
    run = make_run(tmp_path_factory.mktemp("undisturbed"))
    path = os.pathsep.join([str(run.folder), str(ROOT)])
    gspo("train", run.config, "--nproc", 2, PYTHONPATH=path)
    return run


def own(run: Run, **environ: str) -> dict[str, str]:
    """The environment of a container on this machine: the folder of the reward, and no GPU."""
    path = os.pathsep.join([str(run.folder), str(ROOT)])
    return {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", **environ}


def start_trainers(pods: Pods, run: Run, given: dict[str, Any]) -> list[Pod]:
    """Start all pods of the job `trainer`, the first one last."""
    made = []
    for each in reversed(containers(given, "trainer")):
        environ = each.environ | own(run)
        made.insert(0, pods.start(each.pod, program(each.words), environ))
    return made


def without_servers(given: dict[str, Any]) -> dict[str, Any]:
    """The manifest with one rank in each of two pods. The ranks also generate the responses."""
    [container] = trainer(given)["containers"]
    container["args"] = []
    variables = {each["name"]: each for each in container["env"]}
    variables["PET_NPROC_PER_NODE"]["value"] = "1"
    container["env"] = [each for name, each in variables.items() if name != "GSPO_ROLLOUT_NODES"]
    return given


def trainer(given: dict[str, Any]) -> dict[str, Any]:
    [job] = [each for each in given["spec"]["replicatedJobs"] if each["name"] == "trainer"]
    return job["template"]["spec"]["template"]["spec"]


def wait_until_held(run: Run, pods: list[Pod]) -> None:
    holding = run.folder / "holding"
    assert wait_until(holding.exists, pods[0].process, 200), "\n".join(pod.text() for pod in pods)


def codes(pods: list[Pod]) -> list[int]:
    return [pod.wait() for pod in pods]


def test_a_pod_is_killed_and_another_evicted_and_the_run_ends_as_one_that_nothing_happens_to(
    pods: Pods, run: Run, undisturbed: Run
) -> None:
    """If a pod fails, JobSet's controller starts all pods again (Recreate). Here the name of the
    first pod becomes known only after the second pod has looked it up."""
    given = without_servers(manifest())
    names = [each.pod for each in containers(given, "trainer")]
    assert names == ["gspo-trainer-0-0.gspo", "gspo-trainer-0-1.gspo"]
    run.hold(IN_STEP_2)
    first = start_trainers(pods, run, given)
    assert not wait_until_gone(first, 4.0), [pod.text() for pod in first]
    pods.know(*names)
    wait_until_held(run, first)
    first[1].kill()
    run.let_go()
    assert first[0].wait(60) == LOST_PEER, first[0].text()

    run.hold((run.folder / "calls").stat().st_size + 3)
    second = start_trainers(pods, run, given)
    wait_until_held(run, second)
    second[1].evict()  # a node is drained: the kubelet gives the pod its grace period
    second[0].evict()
    run.let_go()
    assert codes(second) == [STOPPED, STOPPED], second[0].text()

    last = start_trainers(pods, run, given)
    assert codes(last) == [0, 0], last[0].text()
    run.assert_same_as(undisturbed)
    assert "Traceback" not in second[0].text() + last[0].text()


def wait_until_gone(pods: list[Pod], seconds: float) -> bool:
    """Whether one of the pods ends in this time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if any(pod.process.poll() is not None for pod in pods):
            return True
        time.sleep(0.1)
    return False


# The variables that Kubeflow and SkyPilot set for pod or node `number`, with one rank in each.
def pytorchjob(number: int) -> dict[str, str]:
    return {
        "MASTER_ADDR": "gspo-0.gspo",
        "MASTER_PORT": "23456",
        "RANK": str(number),  # the number of the pod
        "WORLD_SIZE": "2",
        "PET_NNODES": "2",
        "PET_NODE_RANK": str(number),
        "PET_NPROC_PER_NODE": "1",
    }


def trainjob(number: int) -> dict[str, str]:
    return {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "auto",
        "PET_NODE_RANK": str(number),
        "PET_MASTER_ADDR": "gspo-0.gspo",
        "PET_MASTER_PORT": "29500",
    }


def skypilot(number: int) -> dict[str, str]:
    addresses = [Pods.address(f"gspo-{each}.gspo") for each in (0, 1)]
    return {
        "SKYPILOT_NODE_RANK": str(number),
        "SKYPILOT_NODE_IPS": "\n".join(addresses),
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NUM_GPUS_PER_NODE": "1",
        "SKYPILOT_TASK_ID": "sky-2026-11-27-01-00-00-000000_gspo_1",
    }


@pytest.mark.full  # tests/unit/process/test_nodes.py tests how the variables are read
@pytest.mark.parametrize("variables", [skypilot, pytorchjob, trainjob])
def test_the_variables_of_other_schedulers(
    pods: Pods, run: Run, undisturbed: Run, variables: Callable[[int], dict[str, str]]
) -> None:
    names = ["gspo-0.gspo", "gspo-1.gspo"]
    pods.know(*names)
    command = program(["gspo-megatron", "train", str(run.config)])
    made = [
        pods.start(name, command, variables(number) | own(run)) for number, name in enumerate(names)
    ]
    assert codes(made) == [0, 0], made[0].text()
    run.assert_same_as(undisturbed)


@pytest.mark.full
def test_torchrun_in_the_pods(pods: Pods, run: Run, undisturbed: Run) -> None:
    """The manifest is the same, but its command is torchrun, which reads the same variables."""
    made = []
    for each in containers(without_servers(manifest()), "trainer"):
        pods.know(each.pod)
        script = str(ROOT / "pretrain_scripts/train_gspo.py")
        words = [sys.executable, "-m", "torch.distributed.run", script, str(run.config)]
        made.append(pods.start(each.pod, words, each.environ | own(run)))
    assert codes(made) == [0, 0], made[0].text()
    run.assert_same_as(undisturbed)


@pytest.mark.full
def test_servers_in_a_third_pod_that_is_killed_and_comes_back(
    pods: Pods, tmp_path: Path, vllm_python: Path
) -> None:
    """The second job of the manifest runs without changes, with real vLLM on a CPU. The pods of the
    trainer keep running."""
    run = make_run(
        tmp_path,
        # the smallest heads that vLLM's kernels support
        model={"megatron": {**TINY_MODEL, "kv_channels": 32}},
        rollout={"vllm": {"python": str(vllm_python), "restarts": 4}},
    )
    given = manifest()
    [container] = trainer(given)["containers"]
    container["args"] = ["rollout.engine=vllm", "rollout.vllm.servers=1"]
    [number] = [each for each in container["env"] if each["name"] == "PET_NPROC_PER_NODE"]
    number["value"] = "1"
    [server] = containers(given, "servers")
    pods.know(server.pod, *(each.pod for each in containers(given, "trainer")))
    run.hold(IN_STEP_2)
    servers = [pods.start(server.pod, program(server.words), server.environ | own(run))]
    trainers = start_trainers(pods, run, given)
    wait_until_held(run, trainers)
    servers[0].kill()
    servers.append(pods.start(server.pod, program(server.words), server.environ | own(run)))
    assert wait_until(lambda: "waits for the run" in servers[1].text(), servers[1].process)
    run.let_go()
    assert [pod.wait(500) for pod in trainers] == [0, 0], trainers[0].text() + servers[1].text()
    steps = [each for each in records(run.out) if each["phase"] == "rl" and each["step"]]
    assert [each["step"] for each in steps] == list(range(1, STEPS + 1))
    for each in servers:
        assert f"server 0 started at http://{Pods.address(server.pod)}:" in each.text()
