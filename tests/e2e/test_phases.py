"""A run with phases, in which keys change at given steps. Its results equal those of a run that is
stopped at these steps and changed by hand."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.conftest import write_config
from tests.e2e.resuming import (
    assert_same_run,
    checkpoint_names,
    copied,
    edit,
    environment,
    make_small,
    records,
    start,
    train,
)
from tests.programs import gspo, wait_until

LAST = "rl_00000006"
# The phases change keys of each kind: lengths and sizes, the prompts, a learning rate, and the
# objective. The number of updates per step stays the same.
LONGER = {"rollout": {"max_response_tokens": 9, "prompts_per_step": 3}}
OTHER = {
    "data": {"prompts": "other.jsonl"},
    "objective": {"name": "grpo", "mini_batches": 1},
    "optimizer": {"learning_rate": 1e-3},
}
PHASES = [{"until_step": 2}, {"until_step": 4, **LONGER}, OTHER]


def a_run(toy: Path, folder: Path, phases: list[Any], **training: Any) -> Path:
    folder.mkdir()
    lines = (toy / "train.jsonl").read_text().splitlines(keepends=True)
    (folder / "other.jsonl").write_text("".join(lines[:7]))
    phases = json.loads(json.dumps(phases).replace("other.jsonl", str(folder / "other.jsonl")))
    return make_small(
        write_config(toy, folder),
        objective={"kl": "k3", "kl_coefficient": 0.05},
        training={"steps": 6, "evaluation_interval": 2, "phases": phases, **training},
        checkpoint={"interval": 4, "keep_last": None},
    )


@pytest.fixture(scope="module")
def campaign(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run with three phases."""
    config = a_run(toy, tmp_path_factory.mktemp("campaign") / "whole", PHASES)
    train(config)
    return config.parent


def test_phases_are_stops_with_changes(campaign: Path, toy: Path, tmp_path: Path) -> None:
    """The run with phases and the run that is changed by hand are equal bit for bit. Each border
    has a checkpoint."""
    config = a_run(toy, tmp_path / "by_hand", [], steps=2)
    train(config)
    edit(config, training={"steps": 4}, **LONGER)
    refused = train(config, expect=2).stderr
    assert "rollout.max_response_tokens = 9: was 6" in refused
    assert "go on with the new values from step 3: gspo-megatron train" in refused
    train(config, "--change")
    other = {"prompts": str(config.parent / "other.jsonl")}
    edit(config, training={"steps": 6}, **(OTHER | {"data": other}))
    told = train(config, "--change").stderr
    assert "changed from step 5 on: data.prompts" in told
    assert_same_run(config.parent / "run", campaign / "run", LAST)
    train(config)  # the command of the run with phases continues the run that was changed by hand

    names = checkpoint_names(campaign / "run")
    assert {"rl_00000002", "rl_00000004", LAST, "reference"} <= set(names)
    lines = [json.loads(line) for line in (campaign / "run/changes.jsonl").open()]
    assert [line["step"] for line in lines] == [2, 4]
    assert "rollout.max_response_tokens: 6 -> 9" in lines[0]["changed"]
    by_hand = [json.loads(line) for line in (config.parent / "run/changes.jsonl").open()]
    assert [line["step"] for line in by_hand] == [2, 4]
    kept = yaml.safe_load((campaign / "run/config.resolved.yaml").read_text())
    assert kept["rollout"]["max_response_tokens"] == 6 and len(kept["training"]["phases"]) == 3
    third = yaml.safe_load((campaign / "run/config.from_step_00000005.yaml").read_text())
    assert (third["rollout"]["max_response_tokens"], third["objective"]["name"]) == (9, "grpo")
    assert third["training"]["phases"] == []
    lengths = {each["step"]: each["response/length_max"] for each in records(campaign / "run")[1:]}
    assert max(lengths[1], lengths[2]) <= 6 < max(lengths[3], lengths[4], lengths[5])


def test_a_change_after_a_stop_in_a_rollout_skips_no_prompts(toy: Path, tmp_path: Path) -> None:
    """The stopped run has saved responses of step 3. They depend on the old values. So the step
    begins again, with the same prompts as in a run that was stopped after step 2. This also holds
    if the file with the prompts has moved."""
    stopped, whole = (a_run(toy, tmp_path / name, [], steps=4) for name in ("stopped", "whole"))
    (stopped.parent / "signal_at").write_text("60")
    train(stopped, expect=75)
    assert "rl_00000002_rollouts" in checkpoint_names(stopped.parent / "run")
    train(whole, "training.steps=2")
    (stopped.parent / "moved").mkdir()
    moved = shutil.copy(toy / "train.jsonl", stopped.parent / "moved")
    edit(stopped, data={"prompts": str(moved)})
    for config in (stopped, whole):
        edit(config, rollout={"max_response_tokens": 9})
        train(config, "--change")
    assert_same_run(stopped.parent / "run", whole.parent / "run", "rl_00000004")


def test_a_campaign_that_is_stopped_goes_on(campaign: Path, tmp_path: Path) -> None:
    """The run is stopped near the border to the third phase."""
    config = copied(campaign, tmp_path)
    (config.parent / "signal_at").write_text("60")
    train(config, expect=75)
    assert LAST not in checkpoint_names(config.parent / "run")
    train(config)
    assert_same_run(config.parent / "run", campaign / "run", LAST)


def test_a_campaign_that_is_killed_at_its_borders_goes_on(campaign: Path, tmp_path: Path) -> None:
    """SIGKILL ends the run when the checkpoint of a border is complete. Each step uses its prompts
    once."""
    config = copied(campaign, tmp_path)
    for border in (2, 4):
        process = start(config)
        checkpoint = config.parent / "run/checkpoints" / f"rl_{border:08d}"
        wait_until(checkpoint.is_dir, process)
        assert process.poll() is None, (config.parent / "stderr").read_text()[-3000:]
        process.kill()
        process.wait(timeout=60)
        assert LAST not in checkpoint_names(config.parent / "run")
    train(config)
    assert_same_run(config.parent / "run", campaign / "run", LAST)


def test_phases_on_many_ranks(campaign: Path, tmp_path: Path) -> None:
    """Between phases, the ranks destroy all process groups and build new ones. The tolerance is the
    same as in tests of several layouts, because learning magnifies fp32 rounding."""
    config = copied(campaign, tmp_path)
    train(config, "parallel.layout=tp=2,pp=2,ep=2")
    theirs = {each["step"]: each for each in records(campaign / "run")}
    mine = {each["step"]: each for each in records(config.parent / "run")}
    assert mine.keys() == theirs.keys()
    for step, record in theirs.items():
        for figure in {"loss", "grad_norm", "reward/mean", "lr"} & record.keys():
            assert mine[step][figure] == pytest.approx(record[figure], rel=1e-4, abs=1e-6), step


def test_the_run_is_evaluated_as_in_its_last_phase(campaign: Path, tmp_path: Path) -> None:
    out = tmp_path / "evaluation"
    prompts = f"data.eval_prompts={campaign / 'other.jsonl'}"
    path = environment(campaign / "config.yaml")["PYTHONPATH"]
    gspo("evaluate", campaign / "run", "--output", out, prompts, PYTHONPATH=path)
    values = yaml.safe_load((out / "config.resolved.yaml").read_text())
    assert (values["rollout"]["max_response_tokens"], values["training"]["phases"]) == (9, [])


def test_episodes_are_played_as_in_the_phase_of_their_weights(campaign: Path) -> None:
    path = environment(campaign / "config.yaml")["PYTHONPATH"]

    def played(*words: object) -> str:
        return gspo("play", campaign / "config.yaml", *words, PYTHONPATH=path).stdout

    first = played("--episodes", 1)
    assert "phase: 1 of 3, which ends with step 2\n" in first and ": row train.jsonl:" in first
    given = f"model.checkpoint_path={campaign / 'run/checkpoints'}"
    last = played(f"{given}/{LAST}", "--episodes", 8)
    assert "phase: 3 of 3, which ends with step 6\n" in last and ": row other.jsonl:" in last
    assert "row other.jsonl:1" in last and "row other.jsonl:8" not in last  # it has 7 rows
    assert "phase: 2 of 3, which ends with step 4\n" in played(f"{given}/{LAST}", "--step", 3)


def test_a_phase_renews_its_reference(toy: Path, tmp_path: Path) -> None:
    """At the first update of the phase, the policy equals its reference policy. A resumed run loads
    the same reference policy."""
    phases = [{"until_step": 2}, {"reference": "renew"}]
    config = a_run(toy, tmp_path / "renewed", phases, steps=4)
    edit(config, objective={"mini_batches": 1}, checkpoint={"interval": 1, "keep_last": None})
    train(config)
    run = config.parent / "run"
    kl = {each["step"]: each.get("kl/reference_k3", 0.0) for each in records(run)}
    assert kl[2] > 0 and abs(kl[3]) < 1e-9 and kl[4] > 0
    assert {"reference", "reference_00000002"} <= set(checkpoint_names(run))
    again = records(run)
    shutil.rmtree(run / "checkpoints" / "rl_00000004")
    train(config)
    assert records(run) == again
