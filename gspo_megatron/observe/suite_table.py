"""Shows the figures of a run's suites: a table for the terminal, and single lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gspo_megatron.observe.intervals import CONFIDENCE
from gspo_megatron.observe.metrics_files import read_metrics
from gspo_megatron.observe.progress import MISSING, console_for

_INTERVAL = f"{CONFIDENCE:.0%} interval"
_COLUMNS = "suite", "problems", "k", "mean@k", _INTERVAL, "pass@k", "maj@k", "cut off", "tokens"


def figures_of_suites(metrics: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return the figures by suite, from the metrics evaluation/SUITE/FIGURE."""
    figures_by_suite: dict[str, dict[str, float]] = {}
    for key, value in metrics.items():
        head, _, rest = key.partition("/")
        suite, slash, figure = rest.partition("/")
        if head == "evaluation" and slash:
            figures_by_suite.setdefault(suite, {})[figure] = value
    return figures_by_suite


def only_suites(records: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a run did nothing but evaluate suites."""
    (record, *others) = records or [{}]
    known = {"step", "phase", *(key for key in record if key.count("/") == 2)}
    return not others and bool(figures_of_suites(record)) and record.keys() <= known


def print_suites(run_dir: str | Path, console: Console | None = None) -> None:
    """Print the newest figures of each suite of a run, if there are any.

    `console` defaults to stdout. Raises DataError like `read_metrics`."""
    figures: dict[str, dict[str, float]] = {}
    for record in read_metrics(run_dir):
        figures |= figures_of_suites(record)
    if not figures:
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in _COLUMNS:
        is_name = name == "suite"  # long suite names may wrap, but figures may not
        table.add_column(
            name, justify="left" if is_name else "right", no_wrap=not is_name, overflow="fold"
        )
    for suite, of_suite in figures.items():
        table.add_row(Text(suite), *_row(of_suite))
    console = console or console_for()
    console.print(table)
    for suite, of_suite in figures.items():
        if of_suite.get("failed"):
            console.print(f"{suite}: {failed_text(of_suite)}", markup=False, soft_wrap=True)


def _row(figures: Mapping[str, float]) -> list[str]:
    samples = max(int(key.removeprefix("pass_at_")) for key in figures if key.startswith("pass_"))
    votes = figures.get(f"maj_at_{samples}")
    return [
        f"{figures['problems']:.0f}",
        str(samples),
        f"{figures['mean']:.3f}",
        interval_text(figures, "–") or MISSING,
        f"{figures[f'pass_at_{samples}']:.3f}",
        MISSING if votes is None else f"{votes:.3f}",
        f"{figures['truncated']:.1%}",
        f"{figures['length']:.0f}",
    ]


def interval_text(figures: Mapping[str, float], between: str) -> str | None:
    """Return the 95% interval of a suite's mean; None if all problems have the same mean reward.

    In that case the bootstrap interval would have no width, which would suggest certainty."""
    low, high = figures["ci_low"], figures["ci_high"]
    return f"{low:.3f}{between}{high:.3f}" if low < high else None


def suite_text(figures: Mapping[str, float]) -> str:
    """Return the figures of a suite as one line of text."""
    most = max(int(name.removeprefix("pass_at_")) for name in figures if name.startswith("pass_"))
    interval = interval_text(figures, " to ")
    parts = [f"mean@{most} {figures['mean']:.3f}" + (f" ({interval})" if interval else "")]
    for label, name in (("pass", "pass_at_"), ("maj", "maj_at_")):
        if most > 1 and f"{name}{most}" in figures:
            parts.append(f"{label}@{most} {figures[f'{name}{most}']:.3f}")
    parts.append(f"truncated {figures['truncated']:.1%}, {figures['length']:.0f} tokens")
    if figures.get("failed"):
        parts.append(failed_text(figures))
    return ", ".join(parts)


def failed_text(figures: Mapping[str, float]) -> str:
    """Return a text that says how many calls of a suite's reward failed, and whether their
    responses counted as wrong or their problems were left out."""
    calls = int(figures["failed"])
    failures = f"{calls} call{'s' if calls > 1 else ''} of the reward failed"
    left_out = int(figures["left_out"])
    if not left_out:
        return f"{failures}: counted as wrong"
    return f"{failures}: {left_out} problem{'s' if left_out > 1 else ''} left out"
