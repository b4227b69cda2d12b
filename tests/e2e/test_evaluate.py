"""Evaluation suites in a run, and `gspo-megatron evaluate` on the run's folder, its checkpoint and
its export."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.conftest import Command, write_config
from tests.e2e.resuming import make_small, records, train
from tests.programs import ROOT

pytestmark = pytest.mark.slow

STEPS = 2
SUITES: dict[str, Any] = {
    "exact": {"samples": 4, "reward": {"name": "exact_match"}},
    "near": {
        "template": "{prompt}",
        "samples": 2,
        "limit": 3,
        "correct_at": 0.3,
        "top_k": 5,
        "reward": {"name": "per_character"},
    },
}


@pytest.fixture(scope="module")
def finished(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run with suites, on two ranks."""
    folder = tmp_path_factory.mktemp("suites")
    suites = {name: {"prompts": str(toy / "test.jsonl"), **SUITES[name]} for name in SUITES}
    (folder / "near.yaml").write_text(yaml.safe_dump({"near": suites["near"]}))
    path = make_small(
        write_config(toy, folder),
        training={"steps": STEPS},
        checkpoint={"interval": 1},
        evaluation={
            "interval": 1,
            "suites": {"exact": suites["exact"], "near": str(folder / "near.yaml")},
        },
    )
    train(path, "parallel.layout=dp=2")
    return folder / "run"


def responses(run: Path, suite: str, step: int) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (run / "evaluation.jsonl").read_text().splitlines()]
    return [r for r in found if r.get("suite") == suite and r["step"] == step]


def figures(record: dict[str, Any], suite: str) -> dict[str, float]:
    head = f"evaluation/{suite}/"
    return {k.removeprefix(head): v for k, v in record.items() if k.startswith(head)}


def test_a_run_evaluates_its_suites(finished: Path) -> None:
    steps = records(finished)
    assert [record["step"] for record in steps] == [0, 1, 2]
    # data.eval_prompts is evaluated at its own interval, under its own names.
    assert ["evaluation/accuracy" in record for record in steps] == [True, False, True]
    for record in steps:
        for name, problems in (("exact", 8), ("near", 3)):
            found, samples = figures(record, name), SUITES[name]["samples"]
            drawn = responses(finished, name, record["step"])
            assert [(r["problem"], r["sample"]) for r in drawn] == [
                (problem, sample) for problem in range(problems) for sample in range(samples)
            ]
            rewards = [r["reward"] for r in drawn]
            assert found["mean"] == pytest.approx(sum(rewards) / len(rewards))
            correct = [r["correct"] for r in drawn]
            assert found["pass_at_1"] == pytest.approx(sum(correct) / len(correct))
            groups = [correct[n : n + samples] for n in range(0, len(correct), samples)]
            assert found[f"pass_at_{samples}"] == sum(map(any, groups)) / problems
            assert found["problems"] == problems
    # the samples of a problem are not all equal
    assert len({r["response"] for r in responses(finished, "exact", 0)}) > 8


def test_one_rank_evaluates_a_run_and_its_checkpoint_as_two_did_in_training(
    finished: Path, gspo: Command, tmp_path: Path
) -> None:
    last = records(finished)[-1]
    # Python finds the reward function of data.eval_prompts in these folders
    own_reward = f"{finished.parent}{os.pathsep}{ROOT}"
    told = gspo("evaluate", finished, "-o", tmp_path / "last", PYTHONPATH=own_reward)
    (record,) = records(tmp_path / "last")
    for name in SUITES:
        assert figures(record, name) == figures(last, name)
        mine, theirs = (responses(tmp_path / "last", name, 0), responses(finished, name, STEPS))
        assert [r["response"] for r in mine] == [r["response"] for r in theirs]
    assert "mean@k" in told.stdout and "exact" in told.stdout

    # One suite from a file, with another number of samples.
    suite, first = finished.parent / "near.yaml", finished / "checkpoints" / "rl_00000001"
    more = "evaluation.suites.near.samples=3"
    gspo("evaluate", first, "--suite", suite, more, is_new=True)
    (record,) = records(finished / "evaluation")
    assert figures(record, "near").keys() >= {"pass_at_1", "pass_at_2", "pass_at_3"}
    assert not figures(record, "exact") and "evaluation/accuracy" not in record
    assert len(responses(finished / "evaluation", "near", 0)) == 9


def test_a_source_must_be_one(gspo: Command, tmp_path: Path) -> None:
    told = gspo("evaluate", tmp_path, expect=2).stderr
    assert told.startswith(f"{tmp_path}: neither a run folder, nor a checkpoint, nor")
    assert "no such configuration file" in gspo("evaluate", "nothing", expect=2).stderr


def test_a_fine_tuned_model_is_evaluated_as_it_is(
    finished: Path, toy: Path, gspo: Command, tmp_path: Path
) -> None:
    """The newest checkpoint of the run and the run's export have equal figures in a suite."""
    path, run, suite = tmp_path / "sft.yaml", tmp_path / "sft", finished.parent / "near.yaml"
    tokenizer = str(toy / "tokenizer.model")
    config = {
        "data": {"examples": str(toy / "train.jsonl"), "tokenizer": tokenizer},
        "training": {"steps": 2, "batch_size": 16, "precision": "fp32"},
        "optimizer": {"learning_rate": 3e-3},
        "checkpoint": {"interval": 1},
        "logging": {"dir": str(run), "plots": False},
        "export": {"hf_path": str(tmp_path / "hf")},
    }
    path.write_text(yaml.safe_dump(config))
    gspo("sft", path)
    told = gspo("evaluate", run, "--suite", suite, "rollout.max_response_tokens=6")
    assert "near" in told.stdout and "0/0" not in told.stderr
    assert (run / "evaluation" / "config.resolved.yaml").is_file()
    (found,) = records(run / "evaluation")
    model = ["rollout.max_response_tokens=6", "training.precision=fp32"]
    gspo("evaluate", tmp_path / "hf", "--suite", suite, "-o", tmp_path / "out", *model)
    (exported,) = records(tmp_path / "out")
    assert figures(found, "near") == figures(exported, "near")
    assert "names nothing to evaluate" in gspo("evaluate", run, expect=2).stderr
