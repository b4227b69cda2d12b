"""The benchmarks in tools/ that take seconds still run on the package as it is."""

from __future__ import annotations

import json
import sys

from tests.programs import ROOT, run_program

TOOLS = ROOT / "tools"


def figures_of(tool: str, *words: object) -> dict[str, float]:
    """The last line of a tool, name=value pairs."""
    last = run_program(sys.executable, TOOLS / tool, *words).stdout.splitlines()[-1]
    return {name: float(value) for name, value in (word.split("=") for word in last.split())}


def test_the_rl_step_is_measured() -> None:
    tool = TOOLS / "bench_peers" / "our_step.py"
    done = run_program(sys.executable, str(tool), "--size", "small", "--steps", "1", "--nproc", "1")
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["tokens_per_second"] > 0 and set(figures["seconds"]) >= {"rollout", "train"}


def test_rollouts_are_measured() -> None:
    sizes = {"prompts": 2, "group": 3, "batch-size": 4, "steps": 2, "median": 4, "longest": 12}
    words = [word for name, value in sizes.items() for word in (f"--{name}", value)]
    figures = figures_of("bench_rollout.py", *words)
    contenders = ("refilled", "all_at_once", "transformers", "ratio", "processor_ratio")
    assert set(figures) == {f"{name}_{when}" for name in contenders for when in ("first", "later")}
    assert min(figures.values()) > 0


def test_steadiness_is_measured() -> None:
    figures = figures_of("bench_steady.py", "--rounds", 1, "--steps", 2)
    assert set(figures) == {"steady", "steady_step", "ratio_generate"}
    assert min(figures.values()) > 0


def test_the_overhead_is_measured() -> None:
    figures = figures_of("bench_overhead.py", "--sizes", "small", "--ranks", 1, 2, "--rounds", 1)
    ratios = {"small_1", "small_2"}
    assert set(figures) == ratios | {f"processor_{name}" for name in ratios}
    assert min(figures.values()) > 0


def test_growth_is_measured() -> None:
    figures = figures_of("bench_growth.py", "--sweeps", "ranks", "--most", 2, "--steps", 1)
    assert set(figures) == {"ranks_seconds", "ranks_megabytes"}
