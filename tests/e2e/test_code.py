"""The example in which the policy writes programs. Its recipe runs, and its reward judges programs
correctly."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from gspo_megatron.config import load_config
from gspo_megatron.rewards.registry import check_answers, get_reward
from gspo_megatron.types import Prompt, Sample
from tests import forks
from tests.e2e.resuming import all_records
from tests.programs import ROOT, run_program

EXAMPLE = ROOT / "examples" / "code"
OPERATORS = {"add": "+", "subtract": "-", "multiply by": "*"}


def example(folder: Path, *words: str, **environ: str) -> Path:
    """Run the example's run.sh with `folder` as the current folder. Returns the folder of the RL
    run."""
    environ |= forks.shell_environ()
    run_program("bash", EXAMPLE / "run.sh", *words, environ=environ, cwd=folder, timeout=1800)
    return folder / "runs" / "code" / "rl"


def response_to(prompt: str, steps_left_out: int = 0) -> str:
    """A program that carries out the steps in a prompt, one after the other."""
    steps = prompt.split(", ")
    lines = ["for line in open(0):", "  x = int(line)"]
    for step in steps[: len(steps) - steps_left_out]:
        words, number = re.fullmatch(r"(\D+) (\d+)", step).groups()
        lines.append(f"  x {OPERATORS[words]}= {number}")
    return "\n".join(["```python", *lines, "  print(x)", "```"])


def test_the_example_that_writes_programs(tmp_path: Path) -> None:
    fine_tuning = (
        "training.steps=20 training.batch_size=8 checkpoint.interval=20 logging.plots=false"
    )
    short = ["rollout.prompts_per_step=4", "training.evaluation_prompts=4", "logging.plots=false"]
    run = example(tmp_path, *short, "training.steps=1", SFT=fine_tuning)
    records = all_records(run)
    assert [record["step"] for record in records] == [0, 1]
    assert records[1]["reward/errors"] == records[1]["reward/timeouts"] == 0
    assert records[1]["mismatch/abs_mean"] <= 1e-5
    section = load_config(EXAMPLE / "config.yaml").reward
    reward = get_reward(section.name, None, section.options, section.workers)
    rows = (tmp_path / "runs" / "code" / "data" / "test.jsonl").read_text().splitlines()
    for row in map(json.loads, rows[:2]):
        prompt = row.pop("prompt")
        check_answers(reward, [Prompt(prompt, None, "test.jsonl", fields=row)])
        for left_out, right in ((0, 1.0), (1, 0.0)):
            given = Sample(prompt, None, response_to(prompt, left_out), False, row)
            assert reward(given) == right, given


@pytest.mark.full
def test_a_tiny_model_learns_to_write_programs(tmp_path: Path) -> None:
    records = all_records(example(tmp_path))
    accuracies = [r["evaluation/accuracy"] for r in records if "evaluation/accuracy" in r]
    assert accuracies[0] < 0.2 and accuracies[-1] > 0.8
