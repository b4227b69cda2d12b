"""The manifests of deploy/, compared with copies of the published schemas in tests/schemas. A field
that is not in the schema is a mistake. tests/e2e/test_pods.py runs the manifests."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from gspo_megatron.process.failures import LOST_PEER, STOPPED, USER_ERROR
from gspo_megatron.process.nodes import NAME_SECONDS
from gspo_megatron.rollout.vllm.remote import SILENT_SECONDS
from tests.pods import containers
from tests.programs import ROOT

JOBSET = ROOT / "deploy/kubernetes/jobset.yaml"
SKYPILOT = ROOT / "deploy/skypilot.yaml"
_TYPES: dict[str, Any] = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "integer": int,
    "number": (int, float),
    "null": type(None),
}


def schema(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "tests/schemas" / f"{name}.json").read_text(encoding="utf-8"))


def problems(given: dict[str, Any], value: Any, path: str = "") -> Iterator[str]:
    """Yield the parts of a value that the schema does not allow. This function supports only the
    keywords of JSON Schema that these schemas use."""
    if given.get("x-kubernetes-int-or-string"):
        if isinstance(value, bool) or not isinstance(value, int | str):
            yield f"{path}: neither a number nor a string"
        return
    for word in ("anyOf", "oneOf"):
        if word in given:
            tried = [list(problems(each, value, path)) for each in given[word]]
            if all(tried):
                yield f"{path}: {min(tried, key=len)[0]}"
    kind = given.get("type")
    if isinstance(kind, list):
        yield from problems({"anyOf": [{**given, "type": each} for each in kind]}, value, path)
        return
    if kind is not None:
        is_bool_for_number = isinstance(value, bool) and kind in ("integer", "number")
        if not isinstance(value, _TYPES[kind]) or is_bool_for_number:
            yield f"{path}: not of type {kind}"
            return
    if "enum" in given and value not in given["enum"]:
        yield f"{path}: {value!r} is none of {given['enum']}"
    if "pattern" in given and isinstance(value, str) and not re.search(given["pattern"], value):
        yield f"{path}: {value!r} is not of the form {given['pattern']}"
    if kind == "array":
        for index, each in enumerate(value):
            yield from problems(given.get("items", {}), each, f"{path}[{index}]")
    if kind == "object":
        yield from _problems_of_object(given, value, path)


def _problems_of_object(given: dict[str, Any], value: dict[str, Any], path: str) -> Iterator[str]:
    for name in given.get("required", ()):
        if name not in value:
            yield f"{path}.{name}: missing"
    known, others = given.get("properties", {}), given.get("additionalProperties")
    patterns = given.get("patternProperties", {})
    for name, each in value.items():
        fitting = [found for pattern, found in patterns.items() if re.search(pattern, name)]
        if name in known:
            yield from problems(known[name], each, f"{path}.{name}")
        elif fitting:
            yield from problems(fitting[0], each, f"{path}.{name}")
        elif isinstance(others, dict):
            yield from problems(others, each, f"{path}.{name}")
        elif others is not True and (known or others is False):
            yield f"{path}.{name}: not known"


def jobset() -> dict[str, Any]:
    return yaml.safe_load(JOBSET.read_text(encoding="utf-8"))


def skypilot() -> dict[str, Any]:
    return yaml.safe_load(SKYPILOT.read_text(encoding="utf-8"))


def job(given: dict[str, Any], name: str) -> dict[str, Any]:
    [found] = [each for each in given["spec"]["replicatedJobs"] if each["name"] == name]
    return found["template"]["spec"]


def test_the_jobset_is_as_its_published_schema_wants_it() -> None:
    assert list(problems(schema("jobset_v1alpha2"), jobset())) == []


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda m: m["spec"].update(failurePolicies={}), ".spec.failurePolicies: not known"),
        (lambda m: job(m, "trainer").update(completions="2"), "completions: not of type integer"),
        (
            lambda m: m["spec"]["failurePolicy"].update(restartStrategy="Restart"),
            "'Restart' is none of",
        ),
        (
            lambda m: job(m, "servers")["template"]["spec"]["containers"][0].pop("name"),
            "containers[0].name: missing",
        ),
    ],
)
def test_a_mistake_in_the_jobset_is_found(change: Any, told: str) -> None:
    given = copy.deepcopy(jobset())
    change(given)
    assert any(told in each for each in problems(schema("jobset_v1alpha2"), given))


def test_what_the_parts_of_the_jobset_say_of_each_other() -> None:
    given = jobset()
    trainers, servers = containers(given, "trainer"), containers(given, "servers")
    for index, each in enumerate(trainers):
        assert each.environ["PET_NNODES"] == str(len(trainers))
        assert each.environ["PET_NODE_RANK"] == str(index)
        assert each.environ["PET_MASTER_ADDR"] == trainers[0].pod
        assert each.environ["GSPO_ROLLOUT_NODES"].split(",") == [each.pod for each in servers]
    for each in servers:
        assert each.words[-2:] == ["--name", each.pod]
    for name in ("trainer", "servers"):
        spec = job(given, name)
        assert spec["parallelism"] == spec["completions"]
        assert spec["template"]["spec"]["enableServiceLinks"] is False
    [rule] = job(given, "trainer")["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"]["values"] == [USER_ERROR]


def test_the_servers_have_an_interpreter_on_a_volume_of_theirs() -> None:
    """The image has no vLLM. The trainer tells the servers' agents which interpreter has it."""
    given = jobset()
    [container] = job(given, "servers")["template"]["spec"]["containers"]
    mounts = [Path(each["mountPath"]) for each in container["volumeMounts"]]
    for each in containers(given, "trainer"):
        assert "rollout.engine=vllm" in each.words and "GSPO_ROLLOUT_NODES" in each.environ
        [python] = [w for w in each.words if w.startswith("rollout.vllm.python=")]
        path = Path(python.partition("=")[2])
        assert any(path.is_relative_to(mount) for mount in mounts), python


def test_a_pod_of_servers_may_be_away_as_long_as_a_trainer_waits_for_another() -> None:
    """A new node of a cloud takes minutes. A run without servers would end the JobSet for good."""
    for each in containers(jobset(), "trainer"):
        [restarts] = [w for w in each.words if w.startswith("rollout.vllm.restarts=")]
        assert int(restarts.partition("=")[2]) * SILENT_SECONDS >= NAME_SECONDS


def test_the_task_of_skypilot_is_as_its_published_schema_wants_it() -> None:
    given = skypilot()
    assert list(problems(schema("skypilot_task"), given)) == []
    assert list(problems(schema("skypilot_resources"), given["resources"])) == []
    assert given["resources"]["job_recovery"]["recover_on_exit_codes"] == [STOPPED, LOST_PEER]
    wrong = {**given, "nodes": 2}
    assert list(problems(schema("skypilot_task"), wrong)) == [".nodes: not known"]
