"""The benchmarks in tools/ that take seconds still run on the package as it is."""

from __future__ import annotations

import json
import sys

from tests.programs import ROOT, run_program


def test_the_rl_step_is_measured() -> None:
    tool = ROOT / "tools" / "bench_peers" / "our_step.py"
    done = run_program(sys.executable, str(tool), "--size", "small", "--steps", "1", "--nproc", "1")
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["tokens_per_second"] > 0 and set(figures["seconds"]) >= {"rollout", "train"}


def test_rollouts_are_measured() -> None:
    tool = ROOT / "tools" / "bench_rollout.py"
    sizes = {"prompts": 2, "group": 3, "batch-size": 4, "steps": 2, "median": 4, "longest": 12}
    words = [word for name, value in sizes.items() for word in (f"--{name}", value)]
    last = run_program(sys.executable, str(tool), *words).stdout.splitlines()[-1]
    figures = {n: float(value) for n, value in (word.split("=") for word in last.split())}
    contenders = ("refilled", "all_at_once", "transformers", "ratio", "processor_ratio")
    assert set(figures) == {f"{name}_{when}" for name in contenders for when in ("first", "later")}
    assert min(figures.values()) > 0
