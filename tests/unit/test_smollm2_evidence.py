"""examples/smollm2_moe/evidence.py: its summary of runs, its differences, and the tables of
docs/evidence_smollm2.md."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from scipy import stats

from gspo_megatron.cli.variants import read_variants
from tests.programs import ROOT, module_at

EXAMPLE = ROOT / "examples" / "smollm2_moe"


@pytest.fixture(scope="module")
def evidence() -> ModuleType:
    return module_at(EXAMPLE / "evidence.py")


def write_run(folder: Path, last: int, clipped: float = 0.25) -> None:
    """Write the metrics of a run. Steps after 30 must not count."""
    folder.mkdir(parents=True)
    lines = [{"step": 0, "evaluation/accuracy": 0.1}]
    for step in range(1, last + 1):
        line: dict[str, Any] = {"step": step, "reward/mean": step / 100, "clip/token/binding": 0.0}
        line |= {"clip/token/binding": clipped} if step % 2 else {}
        line |= {"evaluation/accuracy": step / 40} if step % 10 == 0 else {}
        lines.append(line)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_finished_run_is_summed_up(evidence: ModuleType, tmp_path: Path) -> None:
    write_run(tmp_path / "gspo" / "seed_2", last=40)
    write_run(tmp_path / "grpo" / "seed_1", last=29)  # not finished
    write_run(tmp_path / "plots" / "seed_1", last=30)  # no variant
    [found] = evidence.read_runs(tmp_path)
    assert (found["variant"], found["seed"]) == ("gspo", 2)
    assert found["accuracy"] == [[0, 0.1], [10, 0.25], [20, 0.5], [30, 0.75]]
    assert found["reward"] == pytest.approx(0.28)  # the mean of steps 26 to 30
    assert found["clipped"] == pytest.approx(0.125)
    assert "experts" not in found


def test_a_new_run_replaces_the_old_one(evidence: ModuleType) -> None:
    def result(variant: str, seed: int, value: int) -> dict[str, Any]:
        return {"variant": variant, "seed": seed, "value": value}

    old = [result("grpo", 1, 1), result("gspo", 2, 2)]
    joined = evidence.join(old, [result("gspo", 1, 3), result("grpo", 1, 4)])
    assert joined == [result("gspo", 1, 3), result("gspo", 2, 2), result("grpo", 1, 4)]


def test_differences_are_between_runs_of_one_seed(evidence: ModuleType) -> None:
    ends = {("gspo", 1): 0.8, ("gspo", 2): 0.7, ("gspo", 3): 0.9}
    ends |= {("grpo", 1): 0.6, ("grpo", 3): 0.4, ("grpo", 4): 0.1}
    results = [
        {"variant": variant, "seed": seed, "accuracy": [[0, 0.5], [30, end]]}
        for (variant, seed), end in ends.items()
    ]
    assert evidence.gaps(results, "gspo", "grpo") == pytest.approx({1: 0.2, 3: 0.5})


def test_the_interval_is_students(evidence: ModuleType) -> None:
    values = np.random.default_rng(3).normal(0.1, 0.05, 4)
    half = stats.t.ppf(0.975, 3) * values.std(ddof=1) / 2
    low, high = 100 * (values.mean() - half), 100 * (values.mean() + half)
    expected = f"{100 * values.mean():+.1f} ({low:+.1f} to {high:+.1f})"
    assert evidence.interval_text(values) == expected
    assert evidence.interval_text([0.25, 0.5]) == "+37.5"  # no interval of two


def test_the_variants_are_those_of_the_file(evidence: ModuleType) -> None:
    names = [variant.name for variant in read_variants(EXAMPLE / "evidence.yaml")]
    assert names == [*evidence.VARIANTS]


def test_the_page_has_the_tables_of_the_results(evidence: ModuleType) -> None:
    page = evidence.PAGE.read_text(encoding="utf-8")
    assert evidence.with_tables(page, evidence.read_results()) == page
    for name in evidence.TABLES:
        assert page.count(f"<!-- table {name} -->") == 1
