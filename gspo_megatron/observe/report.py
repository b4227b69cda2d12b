"""report.html: one run in full, or several compared; and what a run does at its end."""

from __future__ import annotations

import logging
import math
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from rich.console import Console

from gspo_megatron.errors import UserError
from gspo_megatron.observe import formats, html
from gspo_megatron.observe.plots import plot_comparison, plot_run
from gspo_megatron.observe.records import (
    FINE_TUNING,
    PRETRAINING,
    RL,
    WARM_START,
    Record,
    read_samples,
)
from gspo_megatron.observe.runs import Run, groups, load_runs
from gspo_megatron.observe.streams import SafeStream
from gspo_megatron.observe.summary import (
    Row,
    main_phase,
    steps_done,
    summarize,
    summary_renderable,
    summary_table,
    wall_seconds,
)

__all__ = ["finish_run", "summary_table", "write_report"]

_logger = logging.getLogger(__name__)

_SAMPLES_SHOWN = 12


def write_report(run_dirs: Sequence[str | Path], out_dir: str | Path) -> Path:
    """Write OUT/report.html, a single file with its pictures inside, and return its path.

    One run is shown in full, with its pictures also in OUT/plots. Several runs are laid over each
    other with a table of their figures; runs whose names differ only by their seed are shown as
    mean and standard deviation.

    Raises DataError when a folder holds no run or a damaged one, UserError when `out_dir` cannot be
    written.
    """
    assert run_dirs, "a report of no run"
    runs = load_runs(run_dirs)
    out = Path(out_dir)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{out}: cannot be a folder: {error.strerror}") from error
    title, body = _single(runs[0], out) if len(runs) == 1 else _several(runs)
    path = out / "report.html"
    # Sampled text may hold lone surrogates.
    path.write_text(html.page(title, body), encoding="utf-8", errors="replace")
    return path


def finish_run(run_dir: str | Path, stream: TextIO | None = None, *, plots: bool = True) -> None:
    """Write the run's plots and report, then print its summary and where to find it.

    `stream` is stdout unless given; with plots=False only the summary is printed. A run that has
    come to its end is not made to fail by a plot: what went wrong is printed instead.
    """
    run_dir = Path(run_dir)
    safe = SafeStream(sys.stdout if stream is None else stream)
    console = Console(file=safe, force_terminal=safe.isatty(), highlight=False)  # type: ignore[arg-type]
    where = [f"run     {run_dir}"]
    if plots:
        try:
            where.append(f"report  {write_report([run_dir], run_dir)}")
        except Exception as error:
            _logger.debug("the report was not written", exc_info=True)
            where.append(f"report  not written: {type(error).__name__}: {error}")
    console.print(summary_renderable(run_dir))
    for line in where:
        # A path that is cut into lines by the console could not be copied.
        console.print(line, soft_wrap=True, markup=False)


def _single(run: Run, out: Path) -> tuple[str, list[str]]:
    pictures = plot_run(run.path, out)
    rows = summarize(run.records, main_phase(run.records))
    body = [html.heading(run.name, str(run.path)), html.tiles(_tiles(run, rows))]
    body.append(html.section("Figures", html.card(_single_table(rows))))
    if pictures:
        cards = [html.card(html.image(path, path.stem)) for path in pictures]
        body.append(html.section("Plots", *cards))
    body.extend(_samples(read_samples(run.path)))
    body.append(html.section("Details", *_details(run)))
    return run.name, body


def _several(runs: Sequence[Run]) -> tuple[str, list[str]]:
    title = f"{len(runs)} runs compared"
    body = [html.heading(title, ", ".join(run.name for run in runs))]
    by_phase: dict[str, list[Run]] = {}
    for run in runs:
        by_phase.setdefault(main_phase(run.records), []).append(run)
    for phase, members in by_phase.items():
        body.extend(_compared(members, phase, f" ({phase})" if len(by_phase) > 1 else ""))
    for run in runs:
        body.append(html.section(run.name, *_details(run)))
    return title, body


def _compared(runs: Sequence[Run], phase: str, suffix: str) -> list[str]:
    """Runs that are about the same phase; `suffix` tells which in the headings."""
    by_group, body = groups(runs), []
    with tempfile.TemporaryDirectory() as scratch:
        picture = plot_comparison(runs, Path(scratch) / "comparison.png", phase)
        if picture is not None:
            body.append(html.card(html.image(picture, f"curves of all runs{suffix}")))
    if any(len(members) > 1 for members in by_group.values()):
        table = html.card(_group_table(by_group, phase))
        body.append(html.section(f"Over seeds{suffix}", table))
    body.append(html.section(f"Each run{suffix}", html.card(_run_table(runs, phase))))
    return body


def _tiles(run: Run, rows: Sequence[Row]) -> list[tuple[str, str]]:
    tiles = [
        (f"{row.name}, first to last", f"{row.write(row.first)} → {row.write(row.last)}")
        for row in rows[:2]
        if row.last is not None
    ]
    tiles.append(("steps", f"{steps_done(run.records, main_phase(run.records)):,}"))
    warm = steps_done(run.records, WARM_START)
    if warm:
        tiles.append(("warm start steps", f"{warm:,}"))
    tiles.append(("wall time", formats.duration(wall_seconds(run.records))))
    return tiles


def _single_table(rows: Sequence[Row]) -> str:
    return html.table(
        ["", "first", "last", "best", "at step", "steps not finite"],
        [
            [
                row.name,
                *(row.write(value) for value in (row.first, row.last, row.best)),
                formats.MISSING if row.best_step is None else str(row.best_step),
                str(row.not_finite) if row.not_finite else "",
            ]
            for row in rows
        ],
    )


_SUPERVISED = (
    ("last held-out loss", 0, "last"),
    ("best held-out loss", 0, "best"),
    ("last loss", 1, "last"),
    ("grad norm", 2, "last"),
    ("tokens/s", 3, "last"),
)
# Of each phase: heading, number of the summary row, and which of its values a comparison shows.
_COLUMNS = {
    RL: (
        ("last reward", 0, "last"),
        ("best reward", 0, "best"),
        ("last accuracy", 1, "last"),
        ("best accuracy", 1, "best"),
        ("grad norm", 3, "last"),
        ("clip fraction", 4, "last"),
        ("tokens/s", 5, "last"),
    ),
    PRETRAINING: _SUPERVISED,
    FINE_TUNING: _SUPERVISED,
}


def _run_table(runs: Sequence[Run], phase: str) -> str:
    columns, cells = _COLUMNS[phase], []
    for run in runs:
        rows = summarize(run.records, phase)
        values = [rows[index].write(getattr(rows[index], kind)) for _, index, kind in columns]
        wall = formats.duration(wall_seconds(run.records))
        cells.append([run.name, str(steps_done(run.records, phase)), *values, wall])
    return html.table(["run", "steps", *(name for name, _, _ in columns), "wall time"], cells)


def _group_table(by_group: dict[str, list[Run]], phase: str) -> str:
    columns, cells = _COLUMNS[phase], []
    for name, members in by_group.items():
        tables = [summarize(run.records, phase) for run in members]
        row = [name, str(len(members))]
        for _, index, kind in columns:
            values = [getattr(rows[index], kind) for rows in tables]
            row.append(_mean_and_spread(values, tables[0][index]))
        cells.append(row)
    return html.table(["runs", "seeds", *(name for name, _, _ in columns)], cells)


def _mean_and_spread(values: Sequence[float | None], row: Row) -> str:
    """Mean and sample standard deviation; a run without the figure is told, not left out."""
    present = [value for value in values if value is not None]
    if not present:
        return formats.MISSING
    if len(present) < len(values) or not all(map(math.isfinite, present)):
        return "not in all runs"
    text = row.write(statistics.fmean(present))
    return f"{text} ± {row.write(statistics.stdev(present))}" if len(present) > 1 else text


def _samples(samples: Sequence[Record]) -> list[str]:
    """The first and the last responses that were kept, by step."""
    if not samples:
        return []
    half = _SAMPLES_SHOWN // 2
    shown = samples if len(samples) <= _SAMPLES_SHOWN else [*samples[:half], *samples[-half:]]
    rows = []
    for sample in shown:
        response = str(sample.get("response", ""))
        held_out = " held out" if sample.get("split") == "evaluation" else ""
        rows.append(
            [
                str(sample.get("step", "")) + held_out,
                str(sample.get("prompt", "")),
                response + (" [truncated]" if sample.get("truncated") else ""),
                str(sample.get("answer", "")),
                formats.fixed(sample.get("reward")),
            ]
        )
    head = ["step", "prompt", "response", "answer", "reward"]
    return [html.section("Samples", html.card(html.table(head, rows, text=True)))]


def _details(run: Run) -> list[str]:
    """Configuration and environment, folded, as the run wrote them."""
    folds = []
    for title, name in (
        ("Configuration", "config.resolved.yaml"),
        ("Environment", "environment.json"),
    ):
        path = run.path / name
        if path.is_file():
            folds.append(html.fold(title, path.read_text(encoding="utf-8", errors="replace")))
    return folds or [html.card("No configuration was kept with this run.")]
