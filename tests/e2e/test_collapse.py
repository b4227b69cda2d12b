"""A policy that collapses. The run warns, stops, or rolls back. After a kill during a rollback, the
run is in the state before the rollback or in the state after it. A run can branch at a step that it
kept.

The collapse is planted: from the 129th response on, the reward is 0 until the run has rolled back.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from gspo_megatron.observe.history import history
from tests.e2e.conftest import write_config
from tests.e2e.resuming import (
    all_records,
    assert_same_run,
    checkpoint_names,
    make_small,
    train,
)
from tests.programs import ROOT, gspo

STEPS, LAST_GOOD = 13, 8
LAST = f"rl_{STEPS:08d}"
# If there is a file `kill_before` or `kill_after`, the process is killed just before or just after
# it records its rollback.
REWARD = """
import os, signal, zlib
from pathlib import Path
from gspo_megatron.checkpoint.lineage import Rollbacks
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
    """A configuration whose run collapses. It keeps one checkpoint, in addition to those that a
    rollback needs."""
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
    """The configuration of a finished run that rolled back once."""
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
    # These are the last healthy checkpoint, the checkpoint that would have become healthy next, and
    # the newest checkpoint.
    kept = [name for name in checkpoint_names(run) if name.startswith("rl_")]
    assert kept == ["rl_00000002", "rl_00000006", f"rl_{done:08d}"]
    # A second start trains only if the user asks for it.
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
    # After the rollback the run uses the next prompts. It does not repeat the prompts of the
    # collapse.
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


# Until the run has rolled back, the update of step 8 leaves a gradient norm that is not finite.
LOST = """
from pathlib import Path
from gspo_megatron.models.optimizer import Trainer
from planted import reward
record = Path(__file__).parent / "run/checkpoints/rollbacks.json"
update = Trainer.update
def lost(self):
    if self.scheduler.num_steps == 2 * 7 and not record.exists():
        self.optimizer.step = lambda: (True, float("nan"), None)
    return update(self)
Trainer.update = lost
"""


@pytest.mark.slow
def test_ranks_go_back_from_weights_that_are_lost(toy: Path, tmp_path: Path) -> None:
    config = planted(toy, tmp_path, "rollback")
    (tmp_path / "planted.py").write_text(REWARD.replace("> 128", "< 0"))
    (tmp_path / "lost.py").write_text(LOST)
    said = train(config, "reward.import_path=lost:reward", "--nproc", 2).stderr
    assert "rollback 1 of 2" in said
    (told,) = record_of(tmp_path / "run")["rollbacks"]
    assert (told["from_step"], told["to_step"]) == (8, 2)
    assert told["text"].startswith("the gradient norm is nan")
    assert [each["step"] for each in all_records(tmp_path / "run")] == [*range(1, STEPS + 1)]


# --- A branch of a run ---------------------------------------------------------------------------


def test_a_branch_is_the_run_that_it_left(base: Path, tmp_path: Path) -> None:
    """The branch does not need the old run, which is removed before the branch starts."""
    for name in ("run", "planted.py"):
        copy = shutil.copytree if name == "run" else shutil.copyfile
        copy(base.parent / name, tmp_path / name)
    old, branch = tmp_path / "run", tmp_path / "run-from-6"
    assert f"{branch}/branch.yaml" in train(old, "--from-step", 6, "--only-make").stdout
    (linked,) = {path.stat().st_nlink for path in (branch / "checkpoints").rglob("*.distcp")}
    assert linked == 2
    shutil.rmtree(old)
    gspo("train", branch / "branch.yaml", PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert_same_run(branch, base.parent / "run", LAST)
    told = json.loads((branch / "branch.json").read_text())
    assert (told["run"], told["step"], told["lineage"]) == (str(old), 6, [])
    (sentence,) = history(branch)
    assert sentence == f"This run is a branch of {old} after step 6."


def test_a_branch_may_change_what_a_phase_may_change(base: Path) -> None:
    run, branch = base.parent / "run", base.parent / "other"
    words = ("--from-step", 6, f"logging.dir={branch}", "training.steps=8")
    before = (run / "metrics.jsonl").read_bytes()
    said = train(run, *words, "model.megatron.num_layers=3", expect=2).stderr
    assert "model.megatron.num_layers = 3" in said and not branch.exists()
    train(run, *words, "rollout.max_response_tokens=5")
    (change,) = map(json.loads, (branch / "changes.jsonl").read_text().splitlines())
    assert change["step"] == 6 and change["changed"] == ["rollout.max_response_tokens: 6 -> 5"]
    assert [each["step"] for each in all_records(branch)] == [*range(1, 9)]
    # The same command finds the branch and resumes it.
    said = train(run, *words, "rollout.max_response_tokens=5").stdout
    assert "finished, with 8 of 8 steps" in said
    assert (run / "metrics.jsonl").read_bytes() == before


def test_a_branch_of_nothing_is_refused(base: Path, tmp_path: Path) -> None:
    run = base.parent / "run"
    said = train(run, "--from-step", 3, expect=2).stderr
    assert f"--from-step 3: {run} has no checkpoint of it; allowed: " in said and "6, " in said
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    said = train(run, "--from-step", 6, f"logging.dir={tmp_path}/full", expect=2).stderr
    assert "is not empty; allowed: a new folder for the branch" in said
    said = train(tmp_path, "--from-step", 6, expect=2).stderr
    assert "holds no checkpoint of an RL run" in said


# --- A learning rate that is too large ------------------------------------------------------------

# The task is to write 121212, which is learnt in 36 steps. Then the learning rate becomes ten times
# as large. Either a patch does this until the run has rolled back (file `until_back`), or a phase
# sets the rate.
RATE = """
from pathlib import Path
from gspo_megatron.models.optimizer import Trainer
folder = Path(__file__).parent
update = Trainer.update
def planted(self):
    is_late = self.scheduler.num_steps >= 2 * 36
    if is_late and (folder / "until_back").exists() and not (
        folder / "run/checkpoints/rollbacks.json"
    ).exists():
        for group in self.optimizer.param_groups:
            group["lr"] *= 10
    return update(self)
Trainer.update = planted
def reward(sample):
    return (sum(a == b for a, b in zip(sample.response, "121212")) / 6) ** 3
"""
END = 60


def learning(toy: Path, folder: Path, **training: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "rate.py").write_text(RATE)
    return make_small(
        write_config(toy, folder),
        training={"steps": END, "evaluation_interval": END, **training},
        rollout={"group_size": 8, "prompts_per_step": 8},
        checkpoint={"interval": 5},
        reward={"import_path": "rate:reward"},
        optimizer={"learning_rate": 1e-2, "warmup_steps": 0},
    )


def accuracy(run: Path) -> float:
    (last,) = [each for each in all_records(run) if each["step"] == END]
    return last["evaluation/accuracy"]


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_rollback_of_a_planted_collapse_reaches_the_same_accuracy(
    toy: Path, tmp_path: Path
) -> None:
    train(learning(toy, tmp_path / "good"))
    good = accuracy(tmp_path / "good/run")
    assert good > 0.9
    config = learning(toy, tmp_path / "rollback", on_collapse="rollback")
    (tmp_path / "rollback/until_back").touch()
    said = train(config).stderr
    assert "rollback 1 of 2: the run goes on after step" in said and "rollback 2" not in said
    (told,) = record_of(tmp_path / "rollback/run")["rollbacks"]
    assert 36 < told["from_step"] <= 36 + 12 and told["to_step"] <= 36
    lost = (tmp_path / "rollback/run/metrics.rollback_1.jsonl").read_text().splitlines()
    assert json.loads(lost[-1])["reward/mean"] < 0.5
    assert accuracy(tmp_path / "rollback/run") >= good - 0.05


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_phase_with_ten_times_the_rate_stops_and_a_branch_goes_on(
    toy: Path, tmp_path: Path
) -> None:
    """After a rollback the phase would set the same rate again. So the branch is started with other
    values."""
    phases = [{"until_step": 36}, {"optimizer": {"learning_rate": 0.1}}]
    config = learning(toy, tmp_path, on_collapse="stop", phases=phases)
    said = train(config, expect=2).stderr
    found = re.search(r"gspo-megatron train (\S+) --from-step (\d+)", said)
    assert found is not None
    run, step = Path(found[1]), int(found[2])
    assert 20 < step <= 36
    train(run, "--from-step", step, "training.phases=[]", "optimizer.learning_rate=0.01")
    assert accuracy(run.with_name(f"run-from-{step}")) > 0.9
