"""A run that chooses its prompts by pass rates while servers generate ahead. The prompts of each
step follow from the records, also after kills."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gspo_megatron.config.load import load_config
from gspo_megatron.data.inputs import read_inputs
from gspo_megatron.data.selection import PromptSelection, identity
from gspo_megatron.rollout.store import read_groups
from tests.e2e.test_selection import SELECTION
from tests.vllm.runs import Run, make_run, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(900)]
STEPS, FILE, PROMPTS, SEED = 10, 15, 3, 1
# The reward is 0 or 1, so some groups have no spread and are refilled.
REWARD = """
import zlib
def reward(sample):
    return zlib.crc32(repr((sample.prompt, sample.response)).encode()) % 5 // 3
"""


def draws(run: Run) -> list[dict[str, Any]]:
    """The complete lines of draws.jsonl."""
    path = run.out / "draws.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def works_ahead(run: Run, step: int) -> bool:
    """Whether `step` has its records, and a group of the next step is finished."""
    ahead = run.out / "rollouts" / f"step_{step + 1:08d}_0.groups"
    done = any(each["step"] == step for each in draws(run))
    return done and ahead.exists() and bool(read_groups(ahead))


def test_draws_ahead_follow_from_the_records_of_finished_steps(
    tmp_path: Path, vllm_python: Path
) -> None:
    """The choice uses the same code as without servers, but with pass rates that are a step older.
    The run is killed twice, while servers generate responses of the next step."""
    run = make_run(
        tmp_path,
        vllm_python,
        rollout={
            "group_size": 4,
            "prompts_per_step": PROMPTS,
            "max_response_tokens": 6,
            "max_staleness": 1,
            "dynamic_sampling": True,
            "max_refills": 1,
        },
        data={"prompts": str(tmp_path / "few.jsonl"), "selection": SELECTION},
        reward={"import_path": "zero_or_one:reward"},
        training={"steps": STEPS, "precision": "fp32", "seed": SEED},
        checkpoint={"interval": 1},
        logging={"samples_per_step": 4 * PROMPTS},
    )
    (tmp_path / "zero_or_one.py").write_text(REWARD)
    lines = (tmp_path / "toy/train.jsonl").read_text().splitlines(keepends=True)[:FILE]
    (tmp_path / "few.jsonl").write_text("".join(lines))
    before: list[dict[str, Any]] = []
    for step in (3, 7):
        process = run.start()
        run.wait(process, lambda step=step: works_ahead(run, step))
        before = [each for each in draws(run) if each["step"] < step]
        servers = run.servers()
        process.kill()
        process.communicate(timeout=60)
        wait_for(lambda servers=servers: not any(each.is_running() for each in servers))
    run.finish(run.start())

    found = draws(run)
    assert found[: len(before)] == before  # the saved records stay
    config = load_config(tmp_path / "config.yaml")
    names = [*map(identity, read_inputs(config, []).train)]
    section = config.data.selection
    choice = PromptSelection(names, section, PROMPTS, SEED, staleness=1)
    in_process = PromptSelection(names, section, PROMPTS, SEED, staleness=0)
    differ, refills, under_way = 0, 0, set[int]()
    for step in range(1, STEPS + 1):
        mine = [each for each in found if each["step"] == step]
        rows = choice.next()
        while len(rows) < len(mine):
            refills += 1
            rows = [*rows, *choice.refill(rows)]
        assert [names[row] for row in rows] == [each["prompt"] for each in mine], step
        # No prompt is chosen twice, and none is chosen while its responses are being generated.
        assert len({*rows}) == len(rows) and not under_way & {*rows[:PROMPTS]}
        under_way = {*rows[:PROMPTS]}
        differ += in_process.next() != rows[:PROMPTS]
        for each in (choice, in_process):
            each.learn(mine)
    assert refills > 0 and differ > 0  # the older pass rates give another choice
    trained = [json.loads(line) for line in (run.out / "samples.jsonl").read_text().splitlines()]
    assert len(trained) == STEPS * PROMPTS * 4
    assert max(record["staleness/max"] for record in run.steps()) == 1
