"""Rewards that fail, held-out responses, and runs that only evaluate, with the real command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.conftest import write_config
from tests.e2e.resuming import assert_same_run, checkpoint_names, make_small, records, train

pytestmark = pytest.mark.slow

STEPS, EVALUATED, RESPONSES = 4, 8, 16
LAST = f"rl_{STEPS:08d}"

# If there is a file `broken_at`, the reward fails after as many calls as the file says. The ranks
# count their calls together: each call appends a letter to another file.
REWARD = """
import zlib
from pathlib import Path
folder = Path(__file__).parent
def parts(sample):
    calls, broken = folder / "calls", folder / "broken_at"
    with calls.open("a") as file:
        file.write("x")
    if broken.exists() and calls.stat().st_size > int(broken.read_text()):
        raise ConnectionError("the judge is away")
    value = zlib.crc32(repr((sample.prompt, sample.response)).encode()) % 97 / 96
    return {"value": value, "short": 1 - sample.num_tokens / 6}
"""


def config_in(toy: Path, folder: Path, **sections: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "judging.py").write_text(REWARD)
    reward = {"import_path": "judging:parts", "weights": {"short": 0.1}, "retries": 1}
    training = {"steps": STEPS} | sections.pop("training", {})
    return make_small(
        write_config(toy, folder),
        reward=reward,
        training=training,
        checkpoint={"interval": 10},
        evaluation={"correct_at": 0.5},
        **sections,
    )


@pytest.fixture(scope="module")
def undisturbed(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run on two ranks."""
    path = config_in(toy, tmp_path_factory.mktemp("undisturbed") / "whole")
    train(path, "parallel.layout=dp=2")
    return path.parent / "run"


def held_out(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "evaluation.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("good_calls", "finished"),
    [
        (EVALUATED + 2 * RESPONSES, 2),  # the reward fails in step 3
        # the reward fails in the evaluation after the last step
        (EVALUATED + STEPS * RESPONSES, STEPS),
    ],
)
def test_a_reward_that_fails_loses_no_finished_step(
    toy: Path, tmp_path: Path, undisturbed: Path, good_calls: int, finished: int
) -> None:
    path = config_in(toy, tmp_path / "broken")
    run, broken = path.parent / "run", path.parent / "broken_at"
    broken.write_text(str(good_calls))
    result = train(path, "parallel.layout=dp=2", expect=2)
    saved = run / "checkpoints" / f"rl_{finished:08d}"
    failed, kept = result.stderr.splitlines()[-2:]
    assert failed.startswith(
        "reward 'judging:parts' raised ConnectionError: the judge is away (judging.py:"
    )
    assert "in the last of 2 calls; prompt" in failed
    assert kept == (
        f"{saved}: the run is saved, with {finished} finished steps; the same command continues "
        "it once the reward works"
    )
    assert checkpoint_names(run) == ["latest", saved.name]
    assert [r["step"] for r in records(run)] == list(range(min(finished + 1, STEPS)))

    broken.unlink()
    train(path, "parallel.layout=dp=2")
    assert_same_run(run, undisturbed, LAST)
    assert held_out(run) == held_out(undisturbed)


def test_held_out_responses_and_parts_are_written(undisturbed: Path, toy: Path) -> None:
    found = held_out(undisturbed)
    prompts = [json.loads(line)["prompt"] for line in (toy / "test.jsonl").read_text().splitlines()]
    assert [(r["phase"], r["step"], r["prompt"]) for r in found] == [
        ("rl", step, prompt) for step in (0, STEPS) for prompt in prompts
    ]
    for step in (0, STEPS):
        responses = [r for r in found if r["step"] == step]
        (record,) = (r for r in records(undisturbed) if r["step"] == step)
        rewards = [r["reward"] for r in responses]
        assert record["evaluation/reward"] == pytest.approx(sum(rewards) / EVALUATED)
        assert record["evaluation/accuracy"] == sum(r >= 0.5 for r in rewards) / EVALUATED
        for r in responses:
            assert r["correct"] == (r["reward"] >= 0.5)
            assert r["reward"] == pytest.approx(r["parts"]["value"] + 0.1 * r["parts"]["short"])
    samples = [
        json.loads(line) for line in (undisturbed / "samples.jsonl").read_text().splitlines()
    ]
    assert all(sample["parts"].keys() == {"short", "value"} for sample in samples)


# After the first evaluation, one call of the reward hangs, and so does a process that it starts.
HANGING = """
import contextlib, subprocess, sys, time
from pathlib import Path
folder = Path(__file__).parent
def reward(sample):
    with (folder / "calls").open("a") as file:
        file.write("x")
    if (folder / "calls").stat().st_size > 8:
        with contextlib.suppress(FileExistsError), (folder / "child").open("x") as file:
            words = [sys.executable, "-c", "import time; time.sleep(900)"]
            file.write(str(subprocess.Popen(words, start_new_session=True).pid))
            file.flush()
            time.sleep(900)
    return len(sample.response) / 6
"""


def test_a_reward_that_hangs_costs_its_prompt(toy: Path, tmp_path: Path) -> None:
    path = config_in(toy, tmp_path / "hanging", training={"steps": 2})
    (path.parent / "hanging.py").write_text(HANGING)
    words = ("import_path=hanging:reward", "weights={}", "workers=4", "timeout_seconds=2.0")
    result = train(path, *(f"reward.{w}" for w in (*words, "on_failure=drop_group")))
    _, first, second = records(path.parent / "run")
    assert (first["reward/timeouts"], first["reward/failed_groups"]) == (1, 1)
    assert (second["reward/timeouts"], second["reward/errors"]) == (0, 0)
    told = "reward 'hanging:reward' took longer than reward.timeout_seconds = 2; more of this"
    assert result.stderr.count(told) == 1
    assert not psutil.pid_exists(int((path.parent / "child").read_text()))


def test_without_checkpoints_nothing_is_saved(toy: Path, tmp_path: Path) -> None:
    path = config_in(toy, tmp_path / "broken")
    (path.parent / "broken_at").write_text(str(EVALUATED + RESPONSES))
    result = train(path, "checkpoint.interval=0", "reward.retries=0", expect=2)
    assert result.stderr.splitlines()[-1] == "nothing is saved: checkpoint.interval = 0"
    assert checkpoint_names(path.parent / "run") == []


def test_a_run_of_no_steps_evaluates(toy: Path, tmp_path: Path, undisturbed: Path) -> None:
    path = config_in(toy, tmp_path / "evaluation", logging={"dir": str(tmp_path / "run")})
    model = f"model.checkpoint_path={undisturbed}"
    words = ("training.steps=0", "data.prompts=", model, "logging.plots=true")
    for earlier in ([], [tmp_path / "run.1"]):
        result = train(path, *words)
        run = tmp_path / "run"
        (record,) = records(run)
        final = records(undisturbed)[-1]
        for key in ("evaluation/reward", "evaluation/accuracy"):
            assert record[key] == final[key]
        # The responses are those of the last evaluation of the complete run.
        mine, theirs = held_out(run), held_out(undisturbed)[EVALUATED:]
        assert [r["response"] for r in mine] == [r["response"] for r in theirs]
        assert record["step"] == 0 and not checkpoint_names(run)
        assert "held-out accuracy (reward ≥ 0.5)" in result.stdout
        assert "held-out reward" in result.stdout
        assert "held-out accuracy (reward ≥ 0.5)" in (run / "report.html").read_text()
        assert "(reward >= 0.5)" in result.stderr
        assert [p for p in earlier if not p.exists()] == []
