"""Dynamic sampling, shaping of rewards, and rewards of turns from a user's module, in real runs."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tests.e2e.resuming import all_records
from tests.programs import gspo

MODULE = """
from gspo_megatron.types import Sample, TurnRewards


def two_turns(sample: Sample, bonus: float) -> TurnRewards:
    right = sum(a == b for a, b in zip(sample.response, sample.answer)) / len(sample.answer)
    if "=" in sample.prompt:  # sums are not judged: groups without spread
        return TurnRewards([0.0], [sample.num_tokens])
    if sample.num_tokens == 1:
        return TurnRewards([right], [1])
    starts = sample.response[:1] == sample.answer[:1]
    return TurnRewards([bonus * starts, right], [1, sample.num_tokens])
"""


@pytest.fixture(autouse=True)
def judge_of_turns(tmp_path: Path) -> None:
    (tmp_path / "judge_of_turns.py").write_text(MODULE)


def test_a_run_with_everything_on(config_file: Path, tmp_path: Path) -> None:
    steps, prompts, refills = 3, 4, 2
    gspo(
        "train",
        config_file,
        "parallel.layout=dp=2",
        f"training.steps={steps}",
        "objective.name=gspo_token",
        "rollout.dynamic_sampling=true",
        f"rollout.max_refills={refills}",
        "reward.import_path=judge_of_turns:two_turns",
        "reward.options={bonus: 0.25}",
        "reward.scale=2.0",
        "reward.clip=1.5",
        "reward.overlong_buffer=1",
        "reward.overlong_penalty=0.5",
        "logging.samples_per_step=3",
        PYTHONPATH=str(tmp_path),
    )
    run = tmp_path / "run"
    records = [record for record in all_records(run, "rl") if record["step"] > 0]
    assert [r["step"] for r in records] == list(range(1, steps + 1))
    for record in records:
        assert 0 <= record["rollout/refills"] <= refills
        sampled = prompts * (1 + record["rollout/refills"])
        trained = sampled - record["rollout/groups_dropped"]
        assert 1 <= trained <= prompts
        without = round(record["reward/zero_spread_groups"] * sampled)
        assert record["rollout/groups_dropped"] >= without or record["rollout/no_spread"] == 1
        assert trained == prompts or record["rollout/refills"] == refills
        assert math.isfinite(record["loss"])
        assert record["grad_norm"] > 0
        assert record["reward/shaped_mean"] != record["reward/mean"]
        assert "evaluation/reward" in record or record["step"] < steps
    assert sum(r["rollout/groups_dropped"] for r in records) > 0
    assert not any(r["rollout/no_spread"] for r in records)
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert [s["step"] for s in samples] == [s for s in range(1, steps + 1) for _ in range(3)]
    for sample in samples:
        # The logged reward is the reward before shaping. It must be the reward for the answer of
        # this prompt.
        response, answer = sample["response"], sample["answer"]
        right = sum(a == b for a, b in zip(response, answer)) / len(answer)
        bonus = 0.25 * (response[:1] == answer[:1])
        possible = [0.0] if "=" in sample["prompt"] else [right, right + bonus]
        assert sample["reward"] in map(pytest.approx, possible)


def test_rewards_of_turns_that_are_of_no_use(config_file: Path, tmp_path: Path) -> None:
    words = ("objective.name=gspo", "reward.import_path=judge_of_turns:two_turns")
    options = "reward.options={bonus: 0.25}"
    result = gspo("train", config_file, *words, options, PYTHONPATH=str(tmp_path), expect=2)
    assert "objective.name = 'gspo': there are rewards of turns, which" in result.stderr
