"""The files of a run folder that tell from which step on a run has other values."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from gspo_megatron.config import Config, load_config, parse_config
from gspo_megatron.config.phases import at_step
from gspo_megatron.config.stages import FineTuningConfig
from gspo_megatron.observe.metrics_files import changed_configs, read_changes, read_json_lines
from gspo_megatron.observe.run_logger import RunLogger

COLDER, LINE = "rollout.temperature=0.5", "rollout.temperature: 1.0 -> 0.5"
LONGER = "rollout.max_response_tokens=99"
SUITE = "evaluation.suites={late: {prompts: p.jsonl}}"


def start(
    folder: Path,
    step: int,
    *overrides: str,
    changed: Sequence[str] = (),
    has_rollouts: bool = False,
) -> None:
    """Start a run that goes on after `step`, as rl.run does."""
    values = {"data": {"tokenizer": "t.model"}, "logging": {"dir": str(folder)}}
    run = parse_config({**values, "training": {"steps": 9}}, overrides)
    phase, resumed_at = at_step(run, step + 1), ("rl", step) if step else None
    with RunLogger(run, True, resumed_at, has_changed=bool(changed)) as logger:
        logger.begin_phase(step, changed, run, phase, has_rollouts=has_rollouts)


def written(folder: Path) -> dict[int, Config]:
    return {step: load_config(path) for step, path in changed_configs(folder).items()}


def temperatures(folder: Path) -> dict[int, float]:
    return {step: config.rollout.temperature for step, config in written(folder).items()}


def suites(folder: Path) -> dict[int, list[str]]:
    return {step: [*config.evaluation.suites] for step, config in written(folder).items()}


def changes(folder: Path) -> list[tuple[int, list[str]]]:
    return [(record["step"], record["changed"]) for record in read_changes(folder)]


def test_a_run_without_phases_and_changes_makes_no_file(tmp_path: Path) -> None:
    start(tmp_path, 0)
    start(tmp_path, 3)
    assert not list(tmp_path.glob("config.from_step_*"))
    assert not (tmp_path / "changes.jsonl").exists()


def test_a_change_that_is_taken_back_leaves_no_file(tmp_path: Path) -> None:
    """The run was killed before it saved a step with the new value."""
    start(tmp_path, 0)
    start(tmp_path, 3, COLDER, changed=[LINE])
    assert changes(tmp_path) == [(3, [LINE])] and temperatures(tmp_path) == {4: 0.5}
    start(tmp_path, 3)
    assert changes(tmp_path) == [] and temperatures(tmp_path) == {}
    assert load_config(tmp_path / "config.resolved.yaml").rollout.temperature == 1.0


@pytest.mark.parametrize(("step", "has_rollouts"), [(3, True), (5, False)])
def test_a_change_that_the_run_was_saved_with_stays(
    tmp_path: Path, step: int, has_rollouts: bool
) -> None:
    """In the first case, the saved responses of step 4 were generated with the new value."""
    start(tmp_path, 0)
    start(tmp_path, 3, COLDER, changed=[LINE])
    start(tmp_path, step, COLDER, has_rollouts=has_rollouts)
    assert changes(tmp_path) == [(3, [LINE])] and temperatures(tmp_path) == {4: 0.5}


def test_of_two_changes_at_the_same_step_the_later_one_counts(tmp_path: Path) -> None:
    start(tmp_path, 0)
    for value in ("0.5", "0.25"):
        start(tmp_path, 3, f"rollout.temperature={value}", changed=[value])
    assert changes(tmp_path) == [(3, ["0.25"])] and temperatures(tmp_path) == {4: 0.25}


def test_the_newest_file_has_the_other_values_of_a_later_start(tmp_path: Path) -> None:
    """The suites have no effect on the training, so they may change without a record."""
    start(tmp_path, 0)
    start(tmp_path, 3, COLDER, changed=[LINE])
    start(tmp_path, 5, COLDER, LONGER, changed=["rollout.max_response_tokens: 32 -> 99"])
    start(tmp_path, 7, COLDER, LONGER, SUITE)
    assert suites(tmp_path) == {4: [], 6: ["late"]}
    lengths = [config.rollout.max_response_tokens for config in written(tmp_path).values()]
    assert lengths == [32, 99]
    # a rollback to a step before the second change
    start(tmp_path, 4, COLDER, SUITE)
    assert suites(tmp_path) == {4: ["late"]} and changes(tmp_path) == [(3, [LINE])]


def test_a_phase_is_written_without_the_list_of_phases(tmp_path: Path) -> None:
    phases = "training.phases=[{until_step: 3}, {rollout: {temperature: 0.5}}]"
    words = (phases, "checkpoint.interval=1")
    start(tmp_path, 0, *words)
    assert changes(tmp_path) == [] and temperatures(tmp_path) == {1: 1.0}
    start(tmp_path, 3, *words, changed=[LINE])
    assert changes(tmp_path) == [(3, [LINE])] and temperatures(tmp_path) == {1: 1.0, 4: 0.5}
    assert not any(config.training.phases for config in written(tmp_path).values())
    start(tmp_path, 2, *words)
    assert changes(tmp_path) == [] and temperatures(tmp_path) == {1: 1.0}


def test_changes_and_kept_metrics_are_on_the_disk_before_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a loss of power, a later checkpoint without the record of the change would hide it, and
    a rollback would lose the metrics that it takes back."""
    on_disk: dict[int, int] = {}  # sizes by the numbers of inodes
    fsync = os.fsync

    def noted(file: int) -> None:
        on_disk[os.fstat(file).st_ino] = os.fstat(file).st_size
        fsync(file)

    monkeypatch.setattr(os, "fsync", noted)
    start(tmp_path, 3, COLDER, changed=[LINE])
    config = parse_config({"data": {"tokenizer": "t.model"}, "logging": {"dir": str(tmp_path)}})
    with RunLogger(config, True, ("rl", 3)) as logger:
        logger.write("rl", 4, {"loss": 0.5})
        logger.go_back(3, "kept.jsonl")
    for name in ("changes.jsonl", "config.from_step_00000004.yaml", "kept.jsonl"):
        found = (tmp_path / name).stat()
        assert on_disk.get(found.st_ino) == found.st_size > 0, name


def test_a_change_of_fine_tuning_is_recorded_with_its_stage(tmp_path: Path) -> None:
    values = {"data": {"tokenizer": "t.model"}, "logging": {"dir": str(tmp_path)}}
    line = "optimizer.learning_rate: 0.0001 -> 0.5"

    def go_on(step: int, *changed: str) -> None:
        config = parse_config(values, ["optimizer.learning_rate=0.5"], "run", FineTuningConfig)
        with RunLogger(config, True, ("sft", step), has_changed=bool(changed)) as logger:
            logger.begin_phase(step, changed, config, config)

    go_on(3, line)
    go_on(5)
    record = {"phase": "sft", "step": 3, "changed": [line]}
    assert read_changes(tmp_path) == [record]
    path = changed_configs(tmp_path)[4]
    assert load_config(path, [], FineTuningConfig).optimizer.learning_rate == 0.5
    go_on(2)
    assert read_changes(tmp_path) == [] and changed_configs(tmp_path) == {}


def test_a_file_of_the_user_with_a_similar_name_stays(tmp_path: Path) -> None:
    mine = tmp_path / "config.from_step_00000009.old.yaml"
    mine.write_text("mine\n")
    start(tmp_path, 0)
    start(tmp_path, 3, COLDER, changed=[LINE])
    start(tmp_path, 3)
    assert mine.read_text() == "mine\n" and written(tmp_path) == {}


@pytest.mark.parametrize("is_unlogged", [False, True])
def test_a_step_whose_evaluation_is_repeated_has_its_metrics_once(
    tmp_path: Path, is_unlogged: bool
) -> None:
    """The evaluation of step 2 failed, and the run was saved without the metrics of this step. The
    next start evaluated the step, and was killed before it saved the run again."""
    config = parse_config({"data": {"tokenizer": "t.model"}, "logging": {"dir": str(tmp_path)}})
    with RunLogger(config, True) as logger:
        for step in (0, 1, 2):
            logger.write("rl", step, {"loss": 0.5})
            logger.write_evaluation(step, [{"reward": 1.0}])
            logger.write_draws([{"step": step}])
            logger.write_samples(step, [{"reward": 1.0}])
    RunLogger(config, True, ("rl", 2), is_unlogged=is_unlogged).close()
    left = [0, 1] if is_unlogged else [0, 1, 2]
    names = {"metrics": left, "evaluation": left, "draws": [0, 1, 2], "samples": [0, 1, 2]}
    for name, steps in names.items():
        records = read_json_lines(tmp_path / f"{name}.jsonl")
        assert [record["step"] for record in records] == steps, name


@pytest.mark.parametrize("is_unlogged", [False, True])
def test_lost_metrics_are_told(
    tmp_path: Path, is_unlogged: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file is older than the checkpoint, for example because the folder was copied while the
    run went on."""
    config = parse_config({"data": {"tokenizer": "t.model"}, "logging": {"dir": str(tmp_path)}})
    with RunLogger(config, True) as logger:
        for step in (0, 1, 2):
            logger.write("rl", step, {"loss": 0.5})
    for step in (2 + is_unlogged, 5):
        RunLogger(config, True, ("rl", step), is_unlogged=is_unlogged).close()
    last = 4 if is_unlogged else 5
    lost = f"ends at step 2, and the run resumes after step {last}; "
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"warning: {tmp_path}/metrics.jsonl: {lost}")
