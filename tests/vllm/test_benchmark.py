"""The benchmarks with servers still run on the package as it is."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.programs import ROOT, run_program


def measured(tool: str, python: Path, *words: str) -> dict[str, float]:
    """The figures of the last line that the tool prints."""
    command = (sys.executable, str(ROOT / "tools" / tool), "--python", str(python), *words)
    last = run_program(*command).stdout.splitlines()[-1]
    return {name: float(value) for name, value in (word.split("=") for word in last.split())}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_weight_sync_is_measured(vllm_python: Path) -> None:
    words = ("--gigabytes", "0.1", "--rounds", "2")
    figures = measured("bench_weight_sync.py", vllm_python, *words)
    parts = {"export_seconds", "expected_seconds", "load_seconds", "check_seconds"}
    assert {"ratio", "cp_seconds", *parts} <= figures.keys()
    assert all(figures[name] > 0 for name in ("ratio", "seconds", "cp_seconds", *parts))
    assert 1e8 < figures["bytes"] < 3e8
    # a tensor at a time; the largest is a tenth of this small model
    assert figures["trainer_extra_mb"] < figures["bytes"] / 2e6


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_rollout_plan_is_held_against_a_run(vllm_python: Path) -> None:
    figures = measured("bench_rollout_plan.py", vllm_python, "--steps", "4", "--prompts", "8")
    assert figures["step_seconds"] > figures["rollout_seconds"] > 0 < figures["update_seconds"]
    assert figures["step_ratio"] > 0  # others may take a core at any time: no figure is asked for
