"""Phases of a run whose servers generate ahead. At a border they generate nothing ahead."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.vllm.runs import make_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
BORDER = 2


def test_the_responses_after_a_border_are_the_synchronous_ones(
    tmp_path: Path, vllm_python: Path
) -> None:
    """They have the weights at the border and the lengths of the phase; within a phase they are a
    step older. A run that is killed at the border takes each prompt once."""
    phases = [{"until_step": BORDER}, {"rollout": {"max_response_tokens": 12}}]
    run = make_run(
        tmp_path,
        vllm_python,
        parallel={"layout": "tp=2,pp=2,ep=2"},
        rollout={
            "group_size": 2,
            "prompts_per_step": 4,
            "max_response_tokens": 6,
            "max_staleness": 1,
        },
        training={"steps": 4, "precision": "fp32", "phases": phases},
        checkpoint={"interval": 1},
        logging={"samples_per_step": 8},
    )
    process, border = run.start(), run.out / "checkpoints" / f"rl_{BORDER:08d}"
    run.wait(process, border.is_dir)
    process.kill()
    process.wait(timeout=60)
    run.finish(run.start())
    records = {each["step"]: each for each in run.records()}
    oldest = {step: records[step]["staleness/max"] for step in range(1, 5)}
    assert oldest == {1: 0, 2: 1, 3: 0, 4: 1}
    longest = {step: records[step]["response/length_max"] for step in range(1, 5)}
    assert max(longest[1], longest[2]) <= 6 < max(longest[3], longest[4]) <= 12
    lines = map(json.loads, (run.out / "samples.jsonl").read_text().splitlines())
    # one order of prompts goes through all phases: each prompt comes once, with two responses
    prompts = Counter(line["row_id"] for line in lines)
    assert len(prompts) == 16 and set(prompts.values()) == {2}
