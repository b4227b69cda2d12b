"""A policy that collapses: the run warns, stops, or goes back, and a kill in the middle of going
back leaves it before or after that; a run branches at a kept step.

The collapse is planted: from the 129th response on the reward is 0, until the run has gone back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import write_config
from tests.e2e.resuming import (
    all_records,
    assert_same_run,
    checkpoint_names,
    make_small,
    train,
)

STEPS, LAST_GOOD = 13, 8
LAST = f"rl_{STEPS:08d}"
# `kill_before` and `kill_after`: the process is killed when it would record its rollback, and when
# it has.
REWARD = """
import os, signal, zlib
from pathlib import Path
from gspo_megatron.checkpoint.rollback import Rollbacks
folder = Path(__file__).parent
write = Rollbacks.write
def kill(when):
    if (folder / when).exists():
        (folder / when).unlink()
        os.kill(os.getpid(), signal.SIGKILL)
def killed(self, checkpoints):
    kill("kill_before")
    write(self, checkpoints)
    kill("kill_after")
Rollbacks.write = killed
def reward(sample):
    calls = folder / "calls"
    with calls.open("a") as file:
        file.write("x")
    is_broken = calls.stat().st_size > 128 and not [*folder.glob("run/checkpoints/rollbacks.json")]
    value = zlib.crc32(repr((sample.prompt, sample.response)).encode()) % 97 / 96
    return 0.0 if is_broken else 0.5 + value / 10
"""


def planted(toy: Path, folder: Path, does: str) -> Path:
    """A configuration whose run collapses; one checkpoint is kept beside what the watch keeps."""
    folder.mkdir(exist_ok=True)
    path = make_small(
        write_config(toy, folder),
        data={"eval_prompts": None},
        training={"steps": STEPS, "on_collapse": does},
        checkpoint={"interval": 2, "keep_last": 1},
        reward={"import_path": "planted:reward"},
    )
    (folder / "planted.py").write_text(REWARD)
    return path


@pytest.fixture(scope="module")
def base(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The configuration of a run that went back, and ended."""
    path = planted(toy, tmp_path_factory.mktemp("collapse"), "rollback")
    train(path)
    return path


def record_of(run: Path) -> dict[str, Any]:
    return json.loads((run / "checkpoints" / "rollbacks.json").read_text())


def test_a_collapse_stops_a_run_that_is_saved(toy: Path, tmp_path: Path) -> None:
    config = planted(toy, tmp_path, "stop")
    said = train(config, expect=2).stderr
    run, done = tmp_path / "run", len(all_records(tmp_path / "run"))
    assert LAST_GOOD < done <= LAST_GOOD + 5
    assert f"the run ends, and is saved after step {done}" in said
    assert "the last healthy checkpoint is that of step 2" in said
    # the newest, that of the last healthy stretch, and the one that would have taken its place
    kept = [name for name in checkpoint_names(run) if name.startswith("rl_")]
    assert kept == ["rl_00000002", "rl_00000006", f"rl_{done:08d}"]
    # nothing is trained by a second try, until that is asked for
    assert f"saved after step {done}" in train(config, expect=2).stderr
    assert len(all_records(run)) == done
    said = train(config, "training.on_collapse=warn").stderr
    assert said.count("warning: the policy collapses: ") == 1
    assert [record["step"] for record in all_records(run)] == [*range(1, STEPS + 1)]


def test_a_run_that_goes_back_draws_other_samples(base: Path) -> None:
    run = base.parent / "run"
    record, found = record_of(run), all_records(run)
    (told,) = record["rollbacks"]
    assert LAST_GOOD < told["from_step"] <= LAST_GOOD + 5 and told["to_step"] == 2
    assert [each["step"] for each in found] == [*range(1, STEPS + 1)]
    numbers = [each.get("collapse/rollbacks") for each in found]
    assert numbers == [None] * 2 + [1.0] * (STEPS - 2)
    assert min(each["reward/mean"] for each in found) > 0.5
    before = (run / "metrics.rollback_1.jsonl").read_text().splitlines()
    assert len(before) == told["from_step"] and json.loads(before[-1])["reward/mean"] == 0
    # the prompts are those after the collapse
    at = f"checkpoints/{LAST}/run.json"
    drawn = json.loads((run / at).read_text())["loader"]
    steps = told["from_step"] + STEPS - told["to_step"]
    assert drawn["epoch"] * 64 + drawn["position"] - len(drawn["deferred"]) == 4 * steps


@pytest.mark.slow
def test_a_kill_while_a_run_goes_back_changes_nothing(
    base: Path, toy: Path, tmp_path: Path
) -> None:
    config, run = planted(toy, tmp_path, "rollback"), tmp_path / "run"
    (tmp_path / "kill_before").touch()
    train(config, expect=-9)
    assert not (run / "checkpoints" / "rollbacks.json").exists()
    (tmp_path / "kill_after").touch()
    train(config, expect=-9)
    assert record_of(run)["undone"] and (run / "checkpoints" / "rl_00000010").exists()
    assert "resuming from" in (said := train(config).stderr) and "rl_00000002" in said
    assert_same_run(run, base.parent / "run", LAST)
    assert record_of(run) == record_of(base.parent / "run")
