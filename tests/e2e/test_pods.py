"""The manifests of deploy/, run as network namespaces with the variables that Kubernetes, Kubeflow
and SkyPilot give: no Slurm, no Ray."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from gspo_megatron.process.failures import LOST_PEER, STOPPED
from tests.pods import Container, Pod, Pods, containers, network
from tests.programs import ROOT, gspo, wait_until
from tests.slurm.jobs import CALLS_PER_STEP, STEPS, Run, make_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

IN_STEP_2 = CALLS_PER_STEP + 5  # calls of the reward


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
    """The same run on one machine, which nothing happens to."""
    run = make_run(tmp_path_factory.mktemp("undisturbed"))
    path = os.pathsep.join([str(run.folder), str(ROOT)])
    gspo("train", run.config, "--nproc", 2, PYTHONPATH=path)
    return run


def own(run: Run, **environ: str) -> dict[str, str]:
    """Of a container on this machine: where the reward is, and no GPU."""
    path = os.pathsep.join([str(run.folder), str(ROOT)])
    return {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", **environ}


def start_trainers(pods: Pods, run: Run, given: dict[str, Any]) -> list[Pod]:
    """All pods of the job `trainer`, the first one last."""
    made = []
    for each in reversed(containers(given, "trainer")):
        environ = each.environ | own(run)
        made.insert(0, pods.start(each.pod, program(each.words), environ))
    return made


def without_servers(given: dict[str, Any]) -> dict[str, Any]:
    """One rank in each of the two pods, which generates the responses, too."""
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
    """The controller of JobSet starts all pods again after the failure of one (Recreate). The name
    of the first pod is known only after the second one has looked for it."""
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
    second[1].evict()  # a node is drained: the kubelet gives it the grace period
    second[0].evict()
    run.let_go()
    assert codes(second) == [STOPPED, STOPPED], second[0].text()

    last = start_trainers(pods, run, given)
    assert codes(last) == [0, 0], last[0].text()
    run.assert_same_as(undisturbed)
    assert "Traceback" not in second[0].text() + last[0].text()


def wait_until_gone(pods: list[Pod], seconds: float) -> bool:
    """Whether one of them ends in this time."""
    for pod in pods:
        try:
            pod.process.wait(seconds / len(pods))
        except Exception:  # noqa: BLE001
            continue
        return True
    return False
