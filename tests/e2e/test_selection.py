"""A run that selects its prompts by their pass rates. The selected prompts follow the rules, and a
run that was stopped selects the same prompts."""

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
    make_small,
    records,
    train,
)
from tests.programs import gspo

STEPS, FILE = 8, 14
LAST = f"rl_{STEPS:08d}"
# From the fifth step on, the run knows the pass rates of all prompts.
SELECTION = {
    "by": "pass_rate",
    "low": 0.2,
    "high": 0.8,
    "floor": 0.3,
    "retire_after": 1,
    "revive_after": 3,
}
DYNAMIC = {"dynamic_sampling": True, "max_refills": 1}


def a_run(toy: Path, folder: Path, rows: int = FILE, **training: Any) -> Path:
    folder.mkdir()
    lines = (toy / "train.jsonl").read_text().splitlines(keepends=True)
    (folder / "few.jsonl").write_text("".join(lines[:rows]))
    config = make_small(
        write_config(toy, folder),
        data={"prompts": str(folder / "few.jsonl"), "selection": SELECTION},
        rollout=DYNAMIC,
        training={"steps": STEPS, **training},
        checkpoint={"interval": 2, "keep_last": None},
    )
    # The reward is 0 or 1, so some groups have no spread and are replaced.
    reward = (folder / "resuming_reward.py").read_text()
    (folder / "resuming_reward.py").write_text(reward.replace("% 97 / 96", "% 5 // 3"))
    return config


@pytest.fixture(scope="module")
def undisturbed(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run."""
    config = a_run(toy, tmp_path_factory.mktemp("selection") / "whole")
    train(config)
    return config.parent


def draws(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "draws.jsonl").open()]


def assert_same_draws(run: Path, undisturbed: Path) -> None:
    assert_same_run(run, undisturbed / "run", LAST)
    assert draws(run) == draws(undisturbed / "run")


def test_what_is_drawn_and_kept(undisturbed: Path) -> None:
    found, metrics = draws(undisturbed / "run"), records(undisturbed / "run")[1:]
    assert [each["step"] for each in metrics] == [*range(1, STEPS + 1)]
    seen: set[str] = set()
    for record in metrics:
        of_step = [each for each in found if each["step"] == record["step"]]
        refills = int(record["rollout/refills"])
        assert len(of_step) == 4 * (1 + refills) == len({each["prompt"] for each in of_step})
        # The metrics of a step are means over all of its groups.
        mean = sum(each["reward"] for each in of_step) / len(of_step)
        assert mean == pytest.approx(record["reward/mean"])
        length = sum(each["length"] for each in of_step) / len(of_step)
        assert length == pytest.approx(record["response/length_mean"])
        spread = sum(each["spread"] for each in of_step) / len(of_step)
        assert spread == pytest.approx(1 - record["reward/zero_spread_groups"])
        seen |= {each["prompt"] for each in of_step if not each.get("explored")}
    assert len({each["prompt"] for each in found}) == FILE
    # Computed by hand: the prompts whose pass rates were in the band at step 6.
    known: dict[str, list[tuple[int, float]]] = {}
    for each in found:
        if each["step"] < 6:
            known.setdefault(each["prompt"], []).append((each["step"], each["solved"] / 4))
    chosen = [e["prompt"] for e in found if e["step"] == 6 and not e.get("explored")][:3]
    eligible = {
        name
        for name, of_prompt in known.items()
        if 0.2 <= of_prompt[-1][1] <= 0.8 or (of_prompt[-1][1] == 1 and of_prompt[-1][0] <= 3)
    }
    assert {*chosen} <= eligible and len(eligible) < FILE
    assert metrics[5]["selection/new"] == 0
    text = gspo("prompts", undisturbed / "run", is_new=True).stdout
    assert f"to {FILE} prompts in {len(found)} groups, up to step {STEPS}" in text


def test_a_stopped_run_draws_the_same(undisturbed: Path, tmp_path: Path) -> None:
    """The signal comes between the rollout and the update of a step."""
    config = copied(undisturbed, tmp_path)
    (config.parent / "signal_at").write_text("70")
    train(config, expect=75)
    assert LAST not in checkpoint_names(config.parent / "run")
    train(config)
    assert_same_draws(config.parent / "run", undisturbed)


def test_a_killed_run_draws_the_same(undisturbed: Path, tmp_path: Path) -> None:
    """The folder has records of steps after the checkpoint, and an incomplete line."""
    config = copied(undisturbed, tmp_path, with_run=True)
    run = config.parent / "run"
    for name in checkpoint_names(run):
        if name.startswith("rl_") and name > "rl_00000004":
            shutil.rmtree(run / "checkpoints" / name)
    with (run / "draws.jsonl").open("a") as file:
        file.write('{"step": 8, "pro')
    train(config)
    assert_same_draws(run, undisturbed)


def test_a_run_without_its_last_records_is_refused(undisturbed: Path, tmp_path: Path) -> None:
    """The folder was copied while the run wrote it, so the records are older than the
    checkpoint."""
    config = copied(undisturbed, tmp_path, with_run=True)
    file = config.parent / "run" / "draws.jsonl"
    lines = [line for line in file.open() if json.loads(line)["step"] < STEPS]
    file.write_text("".join(lines))
    told = train(config, f"training.steps={STEPS + 1}", expect=2).stderr
    assert f"{file}: ends at step {STEPS - 1}, and the checkpoint is of step {STEPS}; " in told


def test_other_layouts_draw_the_same(undisturbed: Path, tmp_path: Path) -> None:
    config = copied(undisturbed, tmp_path)
    train(config, "parallel.layout=tp=2,ep=2,dp=2", "training.steps=5")
    mine = draws(config.parent / "run")
    theirs = [each for each in draws(undisturbed / "run") if each["step"] <= 5]
    assert [each["prompt"] for each in mine] == [each["prompt"] for each in theirs]
    assert mine == theirs


def test_statistics_stay_when_files_grow_between_phases(toy: Path, tmp_path: Path) -> None:
    """The second phase has more prompts, in another order. It still uses the pass rates that the
    first phase has recorded."""
    config = a_run(toy, tmp_path / "grown", rows=8)
    lines = (toy / "train.jsonl").read_text().splitlines(keepends=True)[:12]
    (config.parent / "more.jsonl").write_text("".join(reversed(lines)))
    values = yaml.safe_load(config.read_text())
    section = values["data"].pop("selection") | {"floor": 0.0}
    more = {"prompts": str(config.parent / "more.jsonl"), "selection": section}
    values["training"] |= {"steps": 4, "phases": [{"until_step": 3}, {"data": more}]}
    values["rollout"] |= {"dynamic_sampling": False, "max_refills": 4}
    config.write_text(yaml.safe_dump(values))
    train(config)
    found = draws(config.parent / "run")
    old = {each["prompt"] for each in found if each["step"] < 4}
    assert len(old) == 8  # without data.selection, each prompt comes once or twice
    last = {each["prompt"] for each in found if each["step"] == 4}
    assert len(last) == 4 and not last & old  # all of them are new prompts
    record = records(config.parent / "run")[-1]
    assert record["selection/new"] == 4
    rates = {each["prompt"]: each["solved"] / 4 for each in found if each["step"] < 4}
    inside = sum(0.2 <= rate <= 0.8 for rate in rates.values())
    retired = [rate for rate in rates.values() if rate == 1]
    assert record["selection/band"] - inside in (0, len(retired)) and inside > 0
