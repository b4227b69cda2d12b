"""The main figures of a run: first, last and best, as data and as a table for the terminal."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from gspo_megatron.observe import formats
from gspo_megatron.observe.records import (
    FINE_TUNING,
    PRETRAINING,
    RL,
    WARM_START,
    Record,
    phase_of,
    read_metrics,
    series,
)


@dataclass(frozen=True)
class Row:
    """A figure over a run; None where there is none. `best_step` is the step of the best value."""

    name: str
    first: float | None
    last: float | None
    best: float | None
    best_step: int | None
    not_finite: int  # steps at which the figure was NaN or infinite
    write: Callable[[float | None], str]


@dataclass(frozen=True)
class _Figure:
    name: str
    keys: tuple[str, ...]  # the first that the run has
    best: Callable[[Sequence[float]], float] | None  # None: neither high nor low is better
    write: Callable[[float | None], str]


_FIGURES = (
    _Figure("reward", ("reward/mean",), max, formats.fixed),
    _Figure("held-out accuracy", ("evaluation/accuracy",), max, formats.percent),
    _Figure("loss", ("loss",), min, formats.number),
    _Figure("gradient norm", ("grad_norm",), min, formats.number),
    _Figure(
        "clip fraction", ("clip/sequence/binding", "clip/token/binding"), None, formats.percent
    ),
    _Figure("tokens/s", ("perf/tokens_per_second",), max, formats.number),
    _Figure("step time", ("perf/step_seconds",), min, formats.duration),
)
# Of pre-training and fine-tuning.
_SUPERVISED = (
    _Figure("held-out loss", ("evaluation/loss",), min, formats.number),
    *(figure for figure in _FIGURES if figure.name in ("loss", "gradient norm", "tokens/s")),
    _FIGURES[-1],
)


def main_phase(records: Sequence[Record]) -> str:
    """The phase that a run is about."""
    phases = {phase_of(record) for record in records}
    return next((phase for phase in (PRETRAINING, FINE_TUNING) if phase in phases), RL)


def summarize(records: Sequence[Record], phase: str = RL) -> list[Row]:
    """The main figures of a phase of a run, in a fixed order; one row each, present or not.

    Values that are not finite are never the best.
    """
    figures = _FIGURES if phase == RL else _SUPERVISED
    return [_row(records, figure, phase) for figure in figures]


def wall_seconds(records: Sequence[Record]) -> float | None:
    """Seconds spent in the steps of all phases; None when the run did not time them."""
    seconds = [
        value
        for phase in (PRETRAINING, FINE_TUNING, WARM_START, RL)
        for value in series(records, "perf/step_seconds", phase)[1]
        if math.isfinite(value)
    ]
    return sum(seconds) if seconds else None


def steps_done(records: Sequence[Record], phase: str = RL) -> int:
    """The last step of a phase that was written; 0 when there is none."""
    return max((record["step"] for record in records if phase_of(record) == phase), default=0)


def summary_table(run_dir: str | Path, *, width: int = 100) -> str:
    """The main figures of a run as a table of plain text, at most `width` columns wide.

    Raises DataError when the folder holds no run or a damaged one.
    """
    text = io.StringIO()
    console = Console(file=text, width=width, force_terminal=False, color_system=None)
    console.print(summary_renderable(run_dir))
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def summary_renderable(run_dir: str | Path) -> Table:
    """The same table for a console of rich's."""
    records = read_metrics(run_dir)
    table = Table(
        title=_title(Path(run_dir), records),
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("")
    for name in ("first", "last", "best", "at step"):
        table.add_column(name, justify="right", style="bold" if name == "last" else None)
    for row in summarize(records, main_phase(records)):
        name = row.name + (f" (not finite at {row.not_finite} steps)" if row.not_finite else "")
        step = formats.MISSING if row.best_step is None else str(row.best_step)
        values = (row.write(value) for value in (row.first, row.last, row.best))
        table.add_row(name, *values, step)
    table.add_row("wall time", "", formats.duration(wall_seconds(records)), "", "")
    return table


def _title(run_dir: Path, records: Sequence[Record]) -> str:
    title = f"{run_dir.resolve().name}: {steps_done(records, main_phase(records))} steps"
    warm = steps_done(records, WARM_START)
    return title + (f" after a warm start of {warm}" if warm else "")


def _row(records: Sequence[Record], figure: _Figure, phase: str) -> Row:
    steps: list[int] = []
    values: list[float] = []
    for key in figure.keys:
        steps, values = series(records, key, phase)
        if values:
            break
    finite = [(step, value) for step, value in zip(steps, values) if math.isfinite(value)]
    best = best_step = None
    if figure.best is not None and finite:
        best = figure.best([value for _, value in finite])
        best_step = next(step for step, value in finite if value == best)
    return Row(
        name=figure.name,
        first=values[0] if values else None,
        last=values[-1] if values else None,
        best=best,
        best_step=best_step,
        not_finite=len(values) - len(finite),
        write=figure.write,
    )
