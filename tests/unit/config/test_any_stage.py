"""Which stage a configuration is taken to be of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gspo_megatron.config import Config, to_yaml
from gspo_megatron.config.load import load_any_config, stage_of
from gspo_megatron.config.stages import FineTuningConfig, PretrainingConfig
from gspo_megatron.errors import ConfigError

TOKENIZER = {"tokenizer": "t"}


@pytest.mark.parametrize(
    ("values", "stage"),
    [
        ({"data": {"prompts": "p", **TOKENIZER}}, "rl"),
        ({"data": {"examples": "e", **TOKENIZER}}, "sft"),
        ({"data": {"train": ["c"], **TOKENIZER}}, "pretrain"),
        # what it learns from decides, whatever else stands there: that is for the schema to tell
        ({"data": {"examples": "e"}, "rollout": {"group_size": 4}}, "sft"),
        ({"data": {"train": ["c"], "prompts": None}}, "pretrain"),
        # without it, the other keys do
        ({"data": TOKENIZER, "rollout": {}}, "rl"),
        ({"data": TOKENIZER, "training": {"dump_batches": 3}}, "rl"),
        ({"data": TOKENIZER, "training": {"epochs": 2, "batch_size": 4}}, "sft"),
        ({"data": {"sequence_length": 8, **TOKENIZER}}, "pretrain"),
        ({"data": TOKENIZER, "optimizer": {"wsd_steps": 2}, "training": {"tokens": 9}}, "pretrain"),
    ],
)
def test_the_keys_tell_the_stage(values: dict[str, Any], stage: str) -> None:
    assert stage_of(values) == stage


@pytest.mark.parametrize(
    ("values", "told"),
    [
        (
            {"data": {"prompts": "p", "examples": "e"}},
            "names what several stages learn from: data.prompts (rl), data.examples (sft)",
        ),
        (
            {"data": {"sequence_length": 8}, "rollout": {}},
            "has keys of different stages: data.sequence_length (pretrain), rollout (rl)",
        ),
        (
            {"data": TOKENIZER, "export": {"hf_path": "out"}},
            "may be a configuration of sft or pretrain: legal: one of data.examples (sft), "
            "data.train (pretrain), or give --stage",
        ),
        ({"data": TOKENIZER}, "may be a configuration of rl or sft or pretrain"),
        ({"data": "text", "colour": {"red": 1}}, "may be a configuration of rl or sft or pretrain"),
    ],
)
def test_where_they_do_not_they_are_named(values: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        stage_of(values)
    (line,) = caught.value.problems
    assert line.startswith(told)


@pytest.mark.parametrize(
    ("text", "schema"),
    [
        ("data: {tokenizer: t, prompts: p}", Config),
        ("data: {tokenizer: t, examples: e}", FineTuningConfig),
        ("data: {tokenizer: t, train: [c]}", PretrainingConfig),
    ],
)
def test_a_resolved_configuration_is_of_the_same_stage(
    tmp_path: Path, text: str, schema: type
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    config = load_any_config(path)
    assert type(config) is schema
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(to_yaml(config))
    assert load_any_config(resolved) == config


def test_overrides_count_and_all_problems_come_together(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("data: {tokenizer: t}\n")
    assert isinstance(load_any_config(path, ["data.examples=e"]), FineTuningConfig)
    with pytest.raises(ConfigError) as caught:
        load_any_config(path, ["nonsense"])
    first, second = caught.value.problems
    assert first.startswith("override 'nonsense'") and second.startswith(f"{path}: may be")


def test_a_stage_that_is_said_is_what_the_file_is_read_as(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("data: {tokenizer: t, prompts: p}\nrollout: {group_size: 4}\n")
    with pytest.raises(ConfigError) as caught:
        load_any_config(path, stage="sft")
    told = caught.value.problems
    assert any(line.startswith("rollout: unknown section") for line in told)
    assert any(line.startswith("data.prompts = 'p': unknown key") for line in told)
