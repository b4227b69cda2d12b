"""Keys that were renamed. The old name of a key still works, and gives a warning once."""

from __future__ import annotations

from pathlib import Path

import pytest

from gspo_megatron.config.load import STAGES, load_any_config, parse_config, to_yaml
from gspo_megatron.config.renamed import RENAMED
from gspo_megatron.config.resume import find_changes
from gspo_megatron.config.section import keys_of
from gspo_megatron.config.yaml12 import parse_yaml
from gspo_megatron.errors import ConfigError

Capture = pytest.CaptureFixture[str]
DATA = {"tokenizer": "none"}
FILE = """\
data: {tokenizer: none}
training: {steps: 9, dump_batches: 3, phases: [{until_step: 5}, {until_step: null}]}
checkpoint: {interval: 5}
rollout: {vllm: {update_seconds: 70}}
"""


@pytest.fixture(autouse=True)
def nothing_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the warnings that earlier tests have printed."""
    monkeypatch.setenv("GSPO_TOLD_PATHS", "")
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("SLURM_PROCID", raising=False)


def test_the_new_names_are_keys_and_the_old_ones_are_not() -> None:
    for old, new in RENAMED.items():
        keys = keys_of(STAGES["rl"])
        assert new in keys and old not in keys
        # old and new name are in the same section
        assert old.rpartition(".")[0] == new.rpartition(".")[0]


def test_a_file_with_old_names_is_read_and_warned_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.yaml").write_text(FILE)
    config = load_any_config("my.yaml", ["training.idle_restarts=9"])
    assert config.training.keep_step_inputs == 3
    assert config.training.max_restarts_without_progress == 9
    assert config.rollout.vllm.weight_update_timeout_seconds == 70
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "training.dump_batches is now called training.keep_step_inputs; the old name still works",
        "training.idle_restarts is now called training.max_restarts_without_progress; the old name "
        "still works",
        "rollout.vllm.update_seconds is now called rollout.vllm.weight_update_timeout_seconds; the "
        "old name still works",
    ]
    load_any_config("my.yaml", ["training.idle_restarts=9"])
    assert capsys.readouterr().err == ""
    assert not any(old.rpartition(".")[2] in to_yaml(config) for old in RENAMED)


@pytest.mark.parametrize("name", ["dump_batches", "keep_step_inputs"])
def test_an_override_of_either_name_replaces_the_value_of_the_file(name: str) -> None:
    values = {"data": DATA, "training": {"dump_batches": 3}}
    assert parse_config(values, [f"training.{name}=1"]).training.keep_step_inputs == 1


def test_an_override_of_a_whole_section_may_have_old_names() -> None:
    values = {"data": DATA, "rollout": {"vllm": {"update_seconds": 5, "servers": 2}}}
    section = parse_config(values, ["rollout.vllm={update_seconds: 9}"]).rollout.vllm
    assert (section.weight_update_timeout_seconds, section.servers) == (9, 0)


def test_phases_may_have_old_names() -> None:
    second = {"rollout": {"vllm": {"silence_seconds": 50}}}
    training = {"steps": 9, "phases": [{"until_step": 5}, second]}
    config = parse_config({"data": DATA, "checkpoint": {"interval": 5}, "training": training})
    assert config.training.phases[1].model_dump()["rollout"]["vllm"] == {
        "stall_timeout_seconds": 50
    }


def test_both_names_in_one_place_are_refused() -> None:
    values = {"data": DATA, "training": {"dump_batches": 3, "keep_step_inputs": 2, "stpes": 1}}
    with pytest.raises(ConfigError) as error:
        parse_config(values)
    assert any(
        line.startswith("training.dump_batches = 3: its new name training.keep_step_inputs is set")
        for line in error.value.problems
    )
    assert any("training.stpes" in line for line in error.value.problems)


def test_a_run_of_an_earlier_version_has_the_same_value(capsys: Capture) -> None:
    config = parse_config({"data": DATA, "training": {"keep_step_inputs": 3}})
    before = parse_yaml(to_yaml(config), "before")
    before["training"]["dump_batches"] = before["training"].pop("keep_step_inputs")
    changes = find_changes(before, config, {})
    assert (changes.refused, changes.allowed, changes.warned) == ([], [], [])
    assert capsys.readouterr().err == ""
