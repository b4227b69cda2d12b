"""Summarise the runs of evidence.yaml, and write the tables of docs/evidence_smollm2.md.

    python examples/smollm2_moe/evidence.py [RUNS]

RUNS is the folder of `gspo-megatron ablate`, with a run in VARIANT/seed_N. Each finished run gets a
line in results.jsonl. A line of an earlier run of the same variant and seed is replaced. Without
RUNS only the tables are written, from the lines in results.jsonl.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from scipy import stats

from gspo_megatron.errors import DataError
from gspo_megatron.observe.metrics_files import read_json_lines, read_metrics
from gspo_megatron.process.failures import run_script

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results.jsonl"
PAGE = HERE.parents[1] / "docs" / "evidence_smollm2.md"
VARIANTS = ("gspo", "grpo", "gspo+r2", "gspo+r3", "grpo+r2", "grpo+r3", "gspo-16", "grpo-16")
STALE = ("gspo-stale4", "grpo-stale4")  # `stale.py 4` with the settings of gspo and grpo
ALL = (*VARIANTS, *STALE)
# the pairs of variants that are compared: the first minus the second
PAIRS = [("gspo", "grpo"), STALE]
PAIRS += [
    (f"{name}{more}", name)
    for name in ("gspo", "grpo")
    for more in ("+r2", "+r3", "-16", "-stale4")
]
STEPS = 30
ACCURACY, REWARD = "evaluation/accuracy", "reward/mean"
# names of the figures of a result, and the metrics of which they are the means over the steps
MEANS = {"clipped": "clip/token/binding", "experts": "routing/volatility"}

Result = Mapping[str, Any]


def summary(variant: str, seed: int, records: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The result of a run from the lines of its metrics.jsonl; None if it is not finished."""
    steps = {record["step"]: record for record in records if record["step"] <= STEPS}
    if STEPS not in steps:
        return None
    trained = [steps[number] for number in range(1, STEPS + 1)]
    figures = {
        name: mean(record[key] for record in trained if key in record)
        for name, key in MEANS.items()
        if any(key in record for record in trained)
    }
    return {
        "variant": variant,
        "seed": seed,
        "accuracy": [[n, steps[n][ACCURACY]] for n in sorted(steps) if ACCURACY in steps[n]],
        "reward": mean(record[REWARD] for record in trained[-5:]),
        **{name: float(f"{value:.4g}") for name, value in figures.items()},
    }


def read_runs(folder: Path) -> list[dict[str, Any]]:
    """The results of the finished runs in a folder. Raises DataError."""
    paths = sorted(folder.glob("*/seed_*/metrics.jsonl"))
    if not paths:
        wrong = "holds no VARIANT/seed_N/metrics.jsonl"
        raise DataError(f"{folder}: {wrong}; name the folder of gspo-megatron ablate")
    found = []
    for path in paths:
        records = read_metrics(path.parent)
        variant, seed = path.parts[-3], int(path.parts[-2].removeprefix("seed_"))
        if variant in ALL and (result := summary(variant, seed, records)) is not None:
            found.append(result)
    return found


def read_results() -> list[dict[str, Any]]:
    return read_json_lines(RESULTS) if RESULTS.exists() else []


def join(old: Sequence[Result], new: Sequence[Result]) -> list[Result]:
    """All results, sorted. A new result replaces an old one of the same variant and seed."""
    by_run = {(each["variant"], each["seed"]): each for each in (*old, *new)}
    order = {name: number for number, name in enumerate(ALL)}
    return [by_run[run] for run in sorted(by_run, key=lambda run: (order[run[0]], run[1]))]


def last_accuracy(result: Result) -> float:
    return result["accuracy"][-1][1]


def gaps(results: Sequence[Result], left: str, right: str) -> dict[int, float]:
    """The differences of the accuracies at the end, by seed."""
    by_run = {(each["variant"], each["seed"]): last_accuracy(each) for each in results}
    seeds = {seed for _, seed in by_run}
    return {
        seed: by_run[left, seed] - by_run[right, seed]
        for seed in sorted(seeds)
        if (left, seed) in by_run and (right, seed) in by_run
    }


def interval_text(values: Sequence[float]) -> str:
    """The mean in points, with Student's 95% interval if there are three or more values."""
    text = f"{100 * mean(values):+.1f}"
    if len(values) < 3:
        return text
    low, high = stats.ttest_1samp(values, 0.0).confidence_interval()
    return f"{text} ({100 * low:+.1f} to {100 * high:+.1f})"


def runs_table(results: Sequence[Result]) -> list[str]:
    rows = [
        "| variant | seeds | held-out accuracy at step 30, by seed | mean | "
        "reward, steps 26 to 30 | clipped tokens | experts that change |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name in ALL:
        mine = [each for each in results if each["variant"] == name]
        if not mine:
            continue
        found = [last_accuracy(each) for each in mine]
        parts = [
            name,
            str(len(mine)),
            " ".join(f"{100 * value:.1f}%" for value in found),
            f"{100 * mean(found):.1f}%",
            f"{mean(each['reward'] for each in mine):.3f}",
            _share(mine, "clipped"),
            _share(mine, "experts"),
        ]
        rows.append(f"| {' | '.join(parts)} |")
    return rows


def _share(results: Sequence[Result], name: str) -> str:
    values = [each[name] for each in results if name in each]
    return f"{100 * mean(values):.2g}%" if values else ""


def pairs_table(results: Sequence[Result]) -> list[str]:
    rows = ["| difference | pairs | points of held-out accuracy |", "| --- | --- | --- |"]
    for left, right in PAIRS:
        values = [*gaps(results, left, right).values()]
        if values:
            rows.append(f"| {left} minus {right} | {len(values)} | {interval_text(values)} |")
    return rows


TABLES: dict[str, Callable[[Sequence[Result]], list[str]]] = {
    "runs": runs_table,
    "pairs": pairs_table,
}


def with_tables(page: str, results: Sequence[Result]) -> str:
    """The page, with the tables of these results between `<!-- table NAME -->` and
    `<!-- end -->`."""

    def replace(match: re.Match[str]) -> str:
        lines = "\n".join(TABLES[match[1]](results))
        return f"<!-- table {match[1]} -->\n\n{lines}\n\n<!-- end -->"

    return re.sub(r"<!-- table (\w+) -->.*?<!-- end -->", replace, page, flags=re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="?", help="the folder of gspo-megatron ablate")
    arguments = parser.parse_args()
    results = read_results()
    if arguments.runs is not None:
        results = join(results, read_runs(arguments.runs))
        RESULTS.write_text("".join(json.dumps(each) + "\n" for each in results), encoding="utf-8")
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8"), results), encoding="utf-8")
    print("\n".join([*runs_table(results), "", *pairs_table(results)]))


if __name__ == "__main__":
    sys.exit(run_script(main))
