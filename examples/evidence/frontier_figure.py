"""Draw a picture of the runs of frontier.py, and print the documentation's tables of these runs.

    python examples/evidence/frontier_figure.py -o frontier.png    # prints the tables

The left side of the picture is a map. Each cell shows the shares of converged, stuck and collapsed
runs as a bar, and the number of converged runs. The right side shows, for the same runs, the reward
at the end over the size of the updates.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from frontier_rule import LAST, SEEDS, Record, interval, mean
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from records import read
from scipy import stats

from gspo_megatron.errors import DataError
from gspo_megatron.observe.plots import INK, MUTED, PALETTE, STYLE, save_figure
from gspo_megatron.process.failures import run_script

OUTCOMES = {"converged": "#2a9d77", "stuck": "#e9c46a", "collapsed": "#c2415c"}
# In each pair, the first arm is compared with the second.
CONTRASTS = (
    ("gspo", "grpo"),
    *((f"{arm}+{replay}", arm) for arm in ("gspo", "grpo") for replay in ("r2", "r3")),
)
ARMS = ("gspo", "grpo")
SAFE_RATE = 5.7e-4  # the largest rate at which all seeds of all ARMS converge
OLD_AXIS = "old log-probs, vLLM in bf16"
PASSES = {
    "converged": lambda line: line["outcome"] == "converged",
    "not collapsed": lambda line: line["outcome"] != "collapsed",
}


@dataclass(frozen=True)
class Cell:
    """The runs of one arm with one value of the axis, such as a learning rate."""

    value: float
    lines: Sequence[Record]

    def count(self, *outcomes: str) -> int:
        return sum(line["outcome"] in outcomes for line in self.lines)

    def holds(self, ends: str) -> bool | None:
        """Whether all seeds pass the test `ends` of PASSES. None: no seed has failed, but some were
        not run."""
        passed = [PASSES[ends](line) for line in self.lines]
        if not all(passed):
            return False
        return True if len(passed) >= SEEDS else None

    def average(self, key: str) -> float:
        return mean([line[key] for line in self.lines])

    @property
    def ends(self) -> list[float]:
        """The reward at the end of each run."""
        return [end_of(line) for line in self.lines]


def cells(records: Iterable[Record], axis: str, arm: str) -> list[Cell]:
    """The cells of an arm on an axis, by rising value."""
    lines = [line for line in records if (line["axis"], line["arm"]) == (axis, arm)]
    values = sorted({line["value"] for line in lines})
    return [Cell(value, [r for r in lines if r["value"] == value]) for value in values]


def edge(row: Sequence[Cell], ends: str) -> tuple[Cell | None, Cell | None]:
    """Find the first cell that fails. Returns the last cell that holds among the cells with smaller
    values, and the first failing cell."""
    fails = next((cell for cell in row if cell.holds(ends) is False), None)
    below = [c for c in row if c.holds(ends) and (fails is None or c.value < fails.value)]
    return (below[-1] if below else None), fails


def names(records: Iterable[Record], key: str) -> list[str]:
    """The different values of `key`, in the order in which they first occur."""
    return list(dict.fromkeys(line[key] for line in records))


def mapped(records: Iterable[Record]) -> list[str]:
    """The axes of the map: all except OLD_AXIS, which has a table of its own."""
    return [axis for axis in names(records, "axis") if axis != OLD_AXIS]


def draw(records: Sequence[Record], path: Path) -> Path:
    """Draw the picture of all axes."""
    axes_names = mapped(records)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(10.5, 0.6 + 2.3 * len(axes_names)), layout="constrained")
        grid = figure.subplots(len(axes_names), 2, width_ratios=(3, 2), squeeze=False)
        for (left, right), axis in zip(grid, axes_names, strict=True):
            draw_map(left, records, axis)
            draw_sizes(right, records, axis)
        handles = [matplotlib.patches.Patch(color=c, label=name) for name, c in OUTCOMES.items()]
        figure.legend(handles=handles, loc="outside upper right", ncols=len(handles))
        return save_figure(figure, path)


def draw_map(axes: Axes, records: Sequence[Record], axis: str) -> None:
    lines = [line for line in records if line["axis"] == axis]
    arms, values = names(lines, "arm"), sorted({line["value"] for line in lines})
    for y, arm in enumerate(arms):
        row = cells(lines, axis, arm)
        for cell in row:
            left = values.index(cell.value) - 0.45
            for outcome, color in OUTCOMES.items():
                width = 0.9 * cell.count(outcome) / len(cell.lines)
                axes.barh(y, width, 0.8, left, color=color, alpha=0.85)
                left += width
            label = f"{cell.count('converged')}/{len(cell.lines)}"
            x = values.index(cell.value)
            axes.text(x, y, label, ha="center", va="center", color=INK, fontsize=8)
        best, _ = edge(row, "converged")
        if best is not None:
            at = values.index(best.value) + 0.5
            axes.plot([at, at], [y - 0.45, y + 0.45], color=INK, linewidth=2.5)
    axes.set_xticks(range(len(values)), [f"{value:g}" for value in values])
    axes.set_yticks(range(len(arms)), arms)
    axes.set_xlim(-0.5, len(values) - 0.5)
    axes.set_ylim(len(arms) - 0.5, -0.5)
    axes.grid(False)
    axes.set_title(axis)


def draw_sizes(axes: Axes, records: Sequence[Record], axis: str) -> None:
    lines = [line for line in records if line["axis"] == axis]
    for arm, color in zip(names(lines, "arm"), PALETTE):
        of_arm = [line for line in lines if line["arm"] == arm]
        sizes = [line["update_change"] for line in of_arm]
        ends = [end_of(line) for line in of_arm]
        hollow = {} if "grpo" in arm else {"facecolors": "none"}
        axes.scatter(sizes, ends, s=16, linewidths=1, color=color, label=arm, **hollow)
    axes.set_xlim(left=0)
    axes.set_ylim(0, 1)
    axes.set_xlabel("mean |change of a token's log-prob| by one update")
    axes.set_title("reward at the end", color=MUTED)
    axes.legend(fontsize=7)


def edge_table(records: Sequence[Record]) -> list[str]:
    """The table of the edges (see `edge`) of every arm, in units of the axis and as sizes of steps.
    Markdown."""
    rows = [
        "| axis | arm | all converge | not all | step there | no collapse | one | heals |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for axis in mapped(records):
        lines = [line for line in records if line["axis"] == axis]
        for arm in names(lines, "arm"):
            row = cells(lines, axis, arm)
            good, bad = edge(row, "converged")
            safe, lost = edge(row, "not collapsed")
            step = "" if good is None else f"{good.average('update_change'):.3g}"
            texts = ["none" if c is None else f"{c.value:g}" for c in (good, bad, safe, lost)]
            healed = [r["heals"] for cell in row for r in cell.lines if r["heals"]]
            heals = f"{sum(h['outcome'] == 'converged' for h in healed)} of {len(healed)}"
            columns = [axis, arm, *texts[:2], step, *texts[2:], heals]
            rows.append(f"| {' | '.join(columns)} |")
    return rows


def cell_table(records: Sequence[Record]) -> list[str]:
    """The table of every cell, with Clopper-Pearson intervals of the share that converges.
    Markdown."""
    rows = [
        "| axis | value | arm | converged | interval | stuck | collapsed | end | step | clipped |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for axis in mapped(records):
        lines = [line for line in records if line["axis"] == axis]
        for arm in names(lines, "arm"):
            for cell in cells(lines, axis, arm):
                hits, count = cell.count("converged"), len(cell.lines)
                low, high = interval(hits, count)
                columns = [
                    *(axis, f"{cell.value:g}", arm, f"{hits}/{count}"),
                    f"{math.floor(100 * low)}–{math.ceil(100 * high)}%",
                    *(str(cell.count("stuck")), str(cell.count("collapsed"))),
                    *(f"{mean(cell.ends):.2f}", f"{cell.average('update_change'):.3g}"),
                    f"{100 * cell.average('clipped_tokens'):.2g}%",
                ]
                rows.append(f"| {' | '.join(columns)} |")
    return rows


def contrast_table(records: Sequence[Record]) -> list[str]:
    """The table of the differences between the rewards at the end of two arms at the same value,
    with Welch's 95% interval. It leaves out values for which an arm lacks seeds. Markdown."""
    rows = ["| axis | value | higher by | reward at the end |", "| --- | --- | --- | --- |"]
    for axis in mapped(records):
        for left, right in CONTRASTS:
            mine = {cell.value: cell for cell in cells(records, axis, left)}
            for cell in cells(records, axis, right):
                other = mine.get(cell.value)
                if other is None or min(len(other.lines), len(cell.lines)) < SEEDS:
                    continue
                found = stats.ttest_ind(other.ends, cell.ends, equal_var=False)
                low, high = found.confidence_interval()
                gap = mean(other.ends) - mean(cell.ends)
                text = f"{gap:+.2f} ({low:+.2f} to {high:+.2f})"
                rows.append(f"| {axis} | {cell.value:g} | {left} over {right} | {text} |")
    return rows


def paired(
    left: Iterable[Record], right: Iterable[Record], figure: Callable[[Record], float]
) -> tuple[int, float, float, float]:
    """Compare a figure of the runs `left` with the figure of the runs `right` that have the same
    value and seed. Returns the number of pairs, the mean difference, and Student's 95% interval."""
    others = {(line["value"], line["seed"]): figure(line) for line in right}
    both = [(figure(line), others.get((line["value"], line["seed"]))) for line in left]
    gaps = [mine - other for mine, other in both if other is not None]
    low, high = stats.ttest_1samp(gaps, 0.0).confidence_interval()
    return len(gaps), mean(gaps), float(low), float(high)


def end_of(line: Record) -> float:
    """The reward at the end of a run."""
    return mean(line["rewards"][-LAST:])


def gap_text(found: tuple[int, float, float, float]) -> str:
    _, gap, low, high = found
    return f"{gap:+.3f} ({low:+.3f} to {high:+.3f})"


def replay_cost_table(records: Sequence[Record]) -> list[str]:
    """The table of the effect of replay at values where all seeds converge without replay.
    Markdown."""
    rows = [
        "| engine | with over without | rates | pairs | reward at the end | held-out accuracy |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    engines = {"exact": "learning rate", "noisy routers": "learning rate, noisy routers"}
    for engine, axis in engines.items():
        lines = [r for r in records if r["axis"] == axis and r["value"] <= SAFE_RATE]
        for arm, replay in ((a, r) for a in ("gspo", "grpo") for r in ("r2", "r3")):
            left = [line for line in lines if line["arm"] == f"{arm}+{replay}"]
            right = [line for line in lines if line["arm"] == arm]
            shared = {r["value"] for r in left} & {r["value"] for r in right}
            if not shared:
                continue
            ends = paired(left, right, end_of)
            accuracy = paired(left, right, lambda line: line["held_out_accuracy"])
            rates = ", ".join(f"{value:g}" for value in sorted(shared))
            columns = [engine, f"{arm}+{replay}, {arm}", rates, str(ends[0])]
            rows.append(f"| {' | '.join([*columns, gap_text(ends), gap_text(accuracy)])} |")
    return rows


def old_runs_table(records: Sequence[Record]) -> list[str]:
    """The table of the runs whose responses vLLM has generated in bf16, one row for each kind of
    old log-probs. Two more rows have the runs of the exact engine at the same learning rate.
    Markdown."""
    rows = [
        "| old log-probs | converged | end | held-out accuracy | clipped | end, over `recompute` |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    served = [line for line in records if line["axis"] == OLD_AXIS]
    by_arm = {arm: [r for r in served if r["arm"] == arm] for arm in names(served, "arm")}
    values = {line["value"] for line in served}
    exact = [r for r in records if r["axis"] == "learning rate" and r["value"] in values]
    by_arm |= {f"{arm}, exact engine": [r for r in exact if r["arm"] == arm] for arm in ARMS}
    for arm in sorted(by_arm):
        lines = by_arm[arm]
        base = by_arm[arm.replace(", exact engine", "").partition(":")[0] + ": recompute"]
        columns = [
            *(arm, f"{sum(r['outcome'] == 'converged' for r in lines)}/{len(lines)}"),
            f"{mean([end_of(line) for line in lines]):.2f}",
            f"{100 * mean([line['held_out_accuracy'] for line in lines]):.0f}%",
            f"{100 * mean([line['clipped_tokens'] for line in lines]):.2g}%",
            "" if lines is base else gap_text(paired(lines, base, end_of)),
        ]
        rows.append(f"| {' | '.join(columns)} |")
    return rows


# The name that a page gives in <!-- table NAME --> -> the function that makes this table.
TABLES = {
    "frontier_edges": edge_table,
    "frontier_contrasts": contrast_table,
    "frontier_cells": cell_table,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    results = Path(__file__).parent / "results" / "frontier.jsonl"
    parser.add_argument("--results", type=Path, default=results)
    parser.add_argument("-o", "--output", type=Path, default=Path("frontier.png"))
    arguments = parser.parse_args()
    records = read(arguments.results)
    if not records:
        raise DataError(f"{arguments.results}: no such file, or empty")
    print(*("\n".join(table(records)) for table in TABLES.values()), sep="\n\n")
    seconds = sum(line["seconds"] for line in records)
    print(f"\n{len(records)} runs, {seconds / 60:.0f} minutes of processor time")
    draw(records, arguments.output)


if __name__ == "__main__":
    sys.exit(run_script(main))
