"""Pictures of one run and of several runs laid over each other, from metrics.jsonl alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gspo_megatron.observe.panels import COMPARISONS, PAGES, QUANTILES, Page, Panel
from gspo_megatron.observe.records import RL, phase_of
from gspo_megatron.observe.runs import Run, groups, load_runs
from gspo_megatron.observe.style import (
    INK,
    MUTED,
    PALETTE,
    as_percent,
    draw_curve,
    dress,
    log_scale_if_wide,
    panel_grid,
    save,
    small_unit,
    smoothed,
    styled,
)


def plot_run(run_dir: str | Path, out_dir: str | Path | None = None) -> list[Path]:
    """Write plots/*.png, one picture a subject, into the run's folder or `out_dir`.

    Returns their paths. Subjects and panels of which the run has no figures are left out.
    Raises DataError when the folder holds no run or a damaged one.
    """
    run = load_runs([run_dir])[0]
    plots = Path(run_dir if out_dir is None else out_dir) / "plots"
    written = []
    with styled():
        for page in PAGES:
            figure = _draw_page(run, page)
            if figure is not None:
                written.append(save(figure, plots / f"{page.name}.png"))
    return written


def plot_comparison(runs: Sequence[Run], path: Path, phase: str = RL) -> Path | None:
    """Write one picture with the main figures of a phase of several runs laid over each other.

    Runs of one group share a colour: their mean is drawn strong and each of them faint. Returns
    None when the runs have no figure to compare.
    """
    page = COMPARISONS[phase]
    panels = [
        panel for panel in page.panels if any(_present_curves(run, panel, phase) for run in runs)
    ]
    if not panels:
        return None
    with styled():
        figure, all_axes = panel_grid(len(panels), page.title)
        for axes, panel in zip(all_axes, panels):
            _overlay(axes, runs, panel, phase)
        share_legend(figure, all_axes)
        return save(figure, path)


def _draw_page(run: Run, page: Page) -> Figure | None:
    panels = [panel for panel in page.panels if _present_curves(run, panel, page.phase)]
    if not panels:
        return None
    columns = 2 if len(panels) in (2, 4) else 3
    figure, all_axes = panel_grid(len(panels), f"{page.title}: {run.name}", columns)
    for axes, panel in zip(all_axes, panels):
        ylabel = panel.ylabel
        if panel.kind == "fan":
            ylabel = _draw_fan(axes, run, panel, page.phase)
        elif panel.kind == "stack":
            _draw_stack(axes, run, panel, page.phase)
        else:
            ylabel = _draw_lines(axes, run, panel, page.phase)
        dress(axes, panel.title, ylabel)
    return figure


def _present_curves(run: Run, panel: Panel, phase: str) -> list[tuple[str, str]]:
    """The panel's (key, label) pairs of which the run has values, those below a "/" spelt out."""
    names = {key for record in run.records if phase_of(record) == phase for key in record}
    present = []
    for key, label in panel.curves:
        if key.endswith("/"):
            below = sorted(name for name in names if name.startswith(key))
            present.extend((name, name[len(key) :]) for name in below)
        elif key in names:
            present.append((key, label))
    return [curve for curve in present if np.isfinite(run.series(curve[0], phase)[1]).any()]


def _draw_lines(axes: Axes, run: Run, panel: Panel, phase: str) -> str:
    """Plain curves; returns the axis label."""
    present = [
        (label, *run.series(key, phase)) for key, label in _present_curves(run, panel, phase)
    ]
    shown = [value * panel.scale for _, _, values in present for value in values]
    factor, unit = (1.0, "") if panel.percent or panel.log else small_unit(shown)
    for index, (label, steps, values) in enumerate(present):
        scaled = [value * panel.scale * factor for value in values]
        color = PALETTE[index % len(PALETTE)]
        draw_curve(axes, steps, scaled, color, label, panel.noisy)
    if panel.percent:
        as_percent(axes, shown)
    if panel.log:
        log_scale_if_wide(axes, shown)
    return panel.ylabel + unit


def _draw_fan(axes: Axes, run: Run, panel: Panel, phase: str) -> str:
    """Median with the bands p01 to p99 and min to max, less one; returns the axis label."""
    prefix = panel.curves[0][0]
    curves = {}
    steps: list[int] = []
    for name in QUANTILES:
        name_steps, values = run.series(prefix + name, phase)
        if len(name_steps) >= len(steps):
            steps = name_steps
        curves[name] = np.asarray(values) - 1.0
    curves = {name: values for name, values in curves.items() if len(values) == len(steps)}
    scale, unit = small_unit(np.concatenate(list(curves.values())).tolist())
    color = PALETTE[0]
    for low, high, alpha in (("min", "max", 0.12), ("p01", "p99", 0.28)):
        if low in curves and high in curves:
            bottom, top = curves[low] * scale, curves[high] * scale
            label = f"{low} to {high}"
            axes.fill_between(steps, bottom, top, color=color, alpha=alpha, lw=0, label=label)
    if "p50" in curves:
        axes.plot(steps, curves["p50"] * scale, color=color, label="median")
    if panel.floor is not None:
        floor_steps, floor = run.series(panel.floor, phase)
        for sign in (-1, 1):
            axes.plot(
                floor_steps,
                sign * np.asarray(floor) * scale,
                color=MUTED,
                linewidth=1,
                linestyle=(0, (3, 2)),
                label="noise floor" if sign > 0 and floor_steps else None,
            )
    return panel.ylabel + unit


def _draw_stack(axes: Axes, run: Run, panel: Panel, phase: str) -> None:
    present = _present_curves(run, panel, phase)
    tables = [dict(zip(*run.series(key, phase))) for key, _ in present]
    steps = sorted(set.intersection(*(set(table) for table in tables)))
    layers = [np.nan_to_num([table[step] for step in steps]) for table in tables]
    means = [float(np.mean(layer)) if steps else 0.0 for layer in layers]
    labels = [f"{label} {mean:.2g} s" for (_, label), mean in zip(present, means)]
    colors = PALETTE[: len(layers)]
    if len(steps) > 1:
        axes.stackplot(steps, layers, labels=labels, colors=colors, alpha=0.85, linewidth=0)
    else:  # areas need two points; the only step is shown as a bar
        bottom = 0.0
        for layer, label, color in zip(layers, labels, colors):
            axes.bar(steps, layer, bottom=bottom, label=label, color=color, width=0.5)
            bottom += float(np.sum(layer))
    if panel.total is not None:
        total_steps, total = run.series(panel.total, phase)
        axes.plot(total_steps, total, color=INK, linewidth=0.8, label="whole step")
    axes.set_ylim(bottom=0)


def _overlay(axes: Axes, runs: Sequence[Run], panel: Panel, phase: str) -> None:
    shown: list[float] = []
    title = panel.title
    for index, (name, members) in enumerate(groups(runs).items()):
        color = PALETTE[index % len(PALETTE)]
        tables = []
        for run in members:
            present = _present_curves(run, panel, phase)
            if present:
                steps, values = run.series(present[0][0], phase)
                tables.append(dict(zip(steps, [value * panel.scale for value in values])))
                if len(panel.curves) > 1:
                    title = f"{panel.title}: {present[0][1]}"
        if len(tables) == 1:
            draw_curve(axes, list(tables[0]), list(tables[0].values()), color, name)
        elif tables:
            for table in tables:
                values = list(table.values())
                smooth = smoothed(values)
                axes.plot(
                    list(table),
                    values if smooth is None else smooth,
                    color=color,
                    linewidth=0.9,
                    alpha=0.35,
                )
            steps, mean = _mean_curve(tables)
            smooth = smoothed(mean)
            label = f"{name} (mean of {len(tables)})"
            axes.plot(steps, mean if smooth is None else smooth, color=color, label=label, lw=2.1)
        shown.extend(value for table in tables for value in table.values())
    if panel.percent:
        as_percent(axes, shown)
    if panel.log:
        log_scale_if_wide(axes, shown)
    dress(axes, title, panel.ylabel)


def _mean_curve(tables: Sequence[dict[int, float]]) -> tuple[list[int], list[float]]:
    """The mean at the steps that all the runs have."""
    steps = sorted(set.intersection(*(set(table) for table in tables)))
    return steps, [float(np.mean([table[step] for table in tables])) for step in steps]


def share_legend(figure: Figure, all_axes: Sequence[Axes]) -> None:
    """One legend for all panels, which show the same runs in the same colours."""
    entries: dict[str, object] = {}
    for axes in all_axes:
        handles, labels = axes.get_legend_handles_labels()
        for handle, label in zip(handles, labels):
            entries.setdefault(label, handle)
        legend = axes.get_legend()
        if legend is not None:
            legend.remove()
        axes.set_title(axes.get_title(loc="left"), pad=6)
    figure.legend(
        list(entries.values()),
        list(entries),
        loc="outside lower left",
        ncols=min(len(entries), 4),
        fontsize=9,
    )
