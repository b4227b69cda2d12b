"""The advice about an existing run contains commands. Each command works, word for word."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.conftest import write_config
from tests.e2e.resuming import make_small, records, train
from tests.programs import gspo
from tests.unit.hf.published import write_model

WARMER = "rollout.temperature=0.7"
ON_ITS_WEIGHTS = "start a new run on its weights: "


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder whose name must be quoted for the shell and for YAML."""
    path = tmp_path / "my runs: #1"
    path.mkdir()
    return path


def small(toy: Path, folder: Path, model: dict[str, Any] | None = None, **optimizer: Any) -> Path:
    """A configuration of one step that saves a checkpoint."""
    path = make_small(write_config(toy, folder), training={"steps": 1}, data={"eval_prompts": None})
    config = yaml.safe_load(path.read_text())
    config["model"], config["reward"] = model or config["model"], {"name": "per_character"}
    config["optimizer"] = optimizer
    path.write_text(yaml.safe_dump(config))
    return path


def follow(text: str, before: str) -> Path:
    """Run the command that follows these words in the output. Returns the folder of the new run."""
    (command,) = re.findall(f"{re.escape(before)}(.*)", text)
    program, *words = shlex.split(command)
    assert program == "gspo-megatron"
    gspo(*words)
    folders = [yaml.safe_load(word.partition("=")[2]) for word in words if "logging.dir=" in word]
    return Path(folders[-1]) if folders else Path()


def starting_weights(run: Path) -> str:
    return yaml.safe_load((run / "config.resolved.yaml").read_text())["model"]["checkpoint_path"]


def test_a_refused_change_leads_to_a_new_run_and_from_there_to_another(
    toy: Path, folder: Path
) -> None:
    """For the second run, the advice names model.checkpoint_path again."""
    hf = write_model(folder / "hf", "qwen3_moe", seed=9, vocab_size=53)
    config, first = small(toy, folder, {"hf_path": str(hf)}), folder / "run"
    train(config)
    refused = train(config, WARMER, "parallel.layout=dp=2", expect=2).stderr
    assert refused.splitlines()[0] == "rollout.temperature = 0.7: was 1.0"
    second = follow(refused, ON_ITS_WEIGHTS)
    assert second == first.with_name("run-2") and len(records(second)) == 1
    assert starting_weights(second) == str(first / "checkpoints" / "rl_00000001")

    words = [f"logging.dir='{second}'", "model.hf_path="]
    words.append(f"model.checkpoint_path='{starting_weights(second)}'")
    third = follow(train(config, *words, expect=2).stderr, ON_ITS_WEIGHTS)
    assert starting_weights(third) == str(second / "checkpoints" / "rl_00000001")
    assert len(records(third)) == 1


def test_a_finished_run_can_go_on_also_with_another_model(toy: Path, folder: Path) -> None:
    """The weights do not fit the other model, so a run of the other model begins without these
    weights."""
    config, run = small(toy, folder, decay="constant"), folder / "run"
    train(config)
    said = train(config).stdout
    new = follow(said, "to train its weights in a new run: ")
    assert starting_weights(new) == str(run / "checkpoints" / "rl_00000001")
    follow(said, "to continue, raise training.steps: ")
    assert [record["step"] for record in records(run)] == [1, 2]

    refused = train(config, "model.megatron.num_layers=4", "training.steps=2", expect=2).stderr
    other = follow(refused, "start a new run: ")
    assert len(records(other)) == 2 and starting_weights(other) is None


def test_a_finished_stage_with_its_export_can_go_on(toy: Path, folder: Path) -> None:
    """The run counts epochs, so the advice must raise their number, too."""
    config = yaml.safe_load(small(toy, folder, decay="constant").read_text())
    stage = {name: config[name] for name in ("model", "optimizer", "checkpoint")}
    stage |= {
        "data": {"tokenizer": str(toy / "tokenizer.model"), "examples": str(toy / "test.jsonl")},
        "training": {"precision": "fp32", "batch_size": 8, "epochs": 1},
        "logging": {"dir": str(folder / "run")},
        "export": {"hf_path": str(folder / "out")},
    }
    path = folder / "sft.yaml"
    path.write_text(yaml.safe_dump(stage))
    gspo("sft", path)
    said = gspo("sft", path).stdout
    follow(said, "to continue, raise training.steps: ")
    assert [record["step"] for record in records(folder / "run")] == [1, 2]
    new = follow(said.replace("out-2", "out-3"), "to train its weights in a new run: ")
    assert len(records(new)) == 1 and (folder / "out-3" / "config.json").exists()
