"""The changes that `evaluate` makes to the configuration of a run or a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from gspo_megatron.cli.evaluate import _values
from gspo_megatron.config.load import STAGES, parse_config, to_yaml
from gspo_megatron.errors import ConfigError
from tests.unit.cli.conftest import Command, ConfigWriter, refused

SUITES = {"near": {"prompts": "test.jsonl"}}
RUNS: dict[str, dict[str, Any]] = {
    "sft": {"data": {"examples": "a.jsonl", "messages_field": "messages"}},
    "pretrain": {"data": {"train": ["a", "b"], "weights": [1, 2], "sequence_length": 16}},
    "rl": {"data": {"prompts": "a.jsonl", "chat_template": True}},
}


# A preference model gives no responses. tests/e2e/test_reward_model.py tests that `evaluate`
# refuses it.
assert RUNS.keys() == STAGES.keys() - {"reward_model"}


@pytest.mark.parametrize("stage", RUNS)
def test_a_run_of_any_stage_is_evaluated_with_its_model_and_tokenizer(
    stage: str, tmp_path: Path
) -> None:
    """The run's configuration has every key of its stage. The evaluation's configuration
    leaves out the keys that no evaluation has, and has the given suites."""
    values = {
        "model": {"preset": "tiny", "megatron": {"num_layers": 2}},
        "parallel": {"layout": "tp=2,dp=4"},
        "training": {"precision": "fp32", "seed": 7},
        **RUNS[stage],
    }
    values["data"] = {"tokenizer": "t.model", **values["data"]}
    config = parse_config(values, schema=STAGES[stage])  # type: ignore[type-var]
    (tmp_path / "config.resolved.yaml").write_text(to_yaml(config))
    found, out = _values(tmp_path, SUITES)
    evaluated = parse_config(found)
    assert out == str(tmp_path / "evaluation")
    assert evaluated.model.checkpoint_path == str(tmp_path)
    assert evaluated.model.megatron == {"num_layers": 2}
    assert str(evaluated.layout()) == "tp=2"  # as many replicas as there are ranks
    assert (evaluated.training.precision, evaluated.training.seed) == ("fp32", 7)
    assert evaluated.training.steps == 0 and evaluated.data.tokenizer == "t.model"
    assert evaluated.data.chat_template is (stage != "pretrain")
    assert [*evaluated.evaluation.suites] == ["near"]


def test_a_run_is_evaluated_from_another_folder_with_the_tokenizer_of_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The configuration has a path of the tokenizer relative to the folder in which the run was
    started."""
    started, run = tmp_path / "started", tmp_path / "started" / "run"
    checkpoint = run / "checkpoints" / "sft_00000008"
    checkpoint.mkdir(parents=True)
    config = parse_config({"data": {"tokenizer": "t.model", "examples": "a"}}, schema=STAGES["sft"])
    (run / "config.resolved.yaml").write_text(to_yaml(config))
    (started / "t.model").touch()
    (checkpoint / "manifest.json").touch()
    known = {"shape": {}, "vocab_size": 1, "tokenizer": str(started / "t.model")}
    (checkpoint / "model.json").write_text(json.dumps(known))
    monkeypatch.chdir(started)
    assert _values(Path("run"), SUITES)[0]["data"]["tokenizer"] == "t.model"
    monkeypatch.chdir(tmp_path)
    assert _values(Path("started/run"), SUITES)[0]["data"]["tokenizer"] == known["tokenizer"]


def test_a_mistake_in_a_configuration_is_told_and_not_dropped(tmp_path: Path) -> None:
    source = tmp_path / "my.yaml"
    source.write_text("data: {tokenizer: t, examples: a, prompts: b}\nnonsense: {}\n")
    found, _ = _values(source, SUITES)
    assert "nonsense" in found


def test_values_in_place_of_sections_are_all_told(tmp_path: Path) -> None:
    source = tmp_path / "my.yaml"
    source.write_text("data: {tokenizer: t, prompts: b}\nreward: 5\nparallel: 5\n")
    with pytest.raises(ConfigError) as told:
        _values(source, SUITES)
    wrong = "5: must be a mapping of keys, as in `key: value`"
    assert told.value.problems == [f"parallel = {wrong}", f"reward = {wrong}"]


def test_a_run_that_learns_from_a_teacher_alone_is_evaluated_without_it(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    values = {
        "objective": {"distillation": {"url": "http://127.0.0.1:1/v1"}},
        "reward": {"name": "none"},
        "data": {"tokenizer": "t.model", "prompts": "a.jsonl"},
        "evaluation": {"interval": 5, "suites": SUITES},
    }
    path.write_text(to_yaml(parse_config(values)))
    # no suites are given, so the suites of the file are used
    evaluated = parse_config(_values(path, {})[0])
    assert [*evaluated.evaluation.suites] == ["near"] and evaluated.reward.name != "none"
    assert not evaluated.objective.distillation.is_on


def test_a_configuration_is_evaluated_as_in_its_first_phase(tmp_path: Path) -> None:
    """Its weights are those that training begins with."""
    path = tmp_path / "config.yaml"
    first = {"rollout": {"max_response_tokens": 7}, "evaluation": {"suites": SUITES}}
    phases = [{"until_step": 2, **first}, {"rollout": {"max_response_tokens": 9}}]
    values: dict[str, Any] = {
        "data": {"tokenizer": "t.model", "prompts": "a.jsonl"},
        "training": {"steps": 4, "phases": phases},
        "checkpoint": {"interval": 1},
    }
    path.write_text(yaml.safe_dump(values))
    evaluated = parse_config(_values(path, {})[0])
    assert evaluated.rollout.max_response_tokens == 7 and evaluated.training.phases == []
    assert [*evaluated.evaluation.suites] == ["near"]
    phases[0]["rollout"] = {"max_response_tokens": "many"}
    path.write_text(yaml.safe_dump(values))
    with pytest.raises(ConfigError, match="phases.0.: rollout.max_response_tokens = 'many'"):
        _values(path, {})


def test_a_folder_that_cannot_take_an_evaluation_is_named_as_it_was_given(
    gspo: Command, write_config: ConfigWriter, tmp_path: Path
) -> None:
    (tmp_path / "run/checkpoints/rl_00000002").mkdir(parents=True)
    (tmp_path / "file").touch()
    (tmp_path / "suites.yaml").write_text(yaml.safe_dump(SUITES))
    for folder, wrong in (
        ("run", "holds the checkpoints of a run"),
        ("file/below", f"{tmp_path}/file is not a folder"),
    ):
        words = ("--suite", tmp_path / "suites.yaml", "-o", tmp_path / folder)
        told = f"--output {tmp_path / folder}: {wrong}; give another folder"
        assert refused(gspo, "evaluate", write_config(), *words) == [told]


def test_a_converted_checkpoint_is_named_by_a_configuration(gspo: Command, tmp_path: Path) -> None:
    """`convert hf-to-megatron` writes no configuration of a run."""
    converted = tmp_path / "converted"
    converted.mkdir()
    (converted / "model.json").write_text("{}")
    (tmp_path / "suites.yaml").write_text(yaml.safe_dump(SUITES))
    told = refused(gspo, "evaluate", converted, "--suite", tmp_path / "suites.yaml")
    assert told == [
        f"{converted}: a checkpoint without the configuration of a run; evaluate a configuration "
        f"with model.checkpoint_path={converted}"
    ]


def test_a_configuration_is_no_file_of_suites(gspo: Command, write_config: ConfigWriter) -> None:
    config = write_config()
    (told,) = refused(gspo, "evaluate", config, "--suite", config)
    assert told.startswith(f"--suite {config}: a configuration; allowed: ")
