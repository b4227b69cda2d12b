"""Plots of one run, and comparison plots of several runs. They are made from metrics.jsonl alone.

The first part of this file defines the panels (which metrics are plotted, and how), the second part
draws them. This file does not use pyplot, which keeps figures in memory and changes matplotlib's
global state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any, Literal

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from gspo_megatron.files import make_folder, os_errors
from gspo_megatron.observe.metrics_files import (
    FINE_TUNING,
    PREFERENCES,
    PRETRAINING,
    RL,
    Run,
    groups,
    phase_of,
    read_changes,
)

# Colours that stay distinct with common colour vision deficiencies and in grey print.
PALETTE = ("#2563a8", "#e07b28", "#2a9d77", "#c2415c", "#7a5bb0", "#5f6b7a", "#b8922a", "#3aa6c4")
_STYLES = ("-", "--", ":", "-.")  # of the lines, if there are more runs than colours
INK = "#22303c"
MUTED = "#66727f"
_RED = "#b3261e"

_PANEL_WIDTH = 4.2  # in inches
_PANEL_HEIGHT = 2.75
_LETTER_WIDTH = 0.08  # in inches; of a letter of a comparison's legend
_DPI = 140
_SMOOTH_FROM = 40  # curves of fewer points are not smoothed

_TICKS = {"color": MUTED, "labelsize": 8, "major.size": 0}
STYLE: Any = {
    "font.family": "DejaVu Sans",  # comes with matplotlib, so all machines have it
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": "#c5ccd3",
    "axes.labelcolor": MUTED,
    "axes.labelsize": 8.5,
    "axes.linewidth": 0.8,
    "axes.formatter.useoffset": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlecolor": INK,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e9ed",
    **{f"{axis}tick.{name}": value for axis in "xy" for name, value in _TICKS.items()},
    "lines.linewidth": 1.7,
    "legend.frameon": False,
    "legend.fontsize": 8,
}


# --- panels ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Panel:
    """One small plot.

    A key that ends in "/" stands for every metric below it. A comparison of runs draws only the
    first key that is present. Kind "fan" has one key, below which the quantiles of a ratio are. It
    shows the quantiles minus one, as bands around the median. Kind "stack" shows its keys as
    layers, with `total` as a line.
    """

    title: str
    ylabel: str
    keys: tuple[str, ...]
    kind: Literal["lines", "fan", "stack"] = "lines"
    total: str = ""
    floor: str = ""  # key of the noise floor: dashed lines at ± its value
    percent: bool = False
    log: bool = False
    noisy: bool = True  # whether a moving average is drawn
    scale: float = 1.0


@dataclass(frozen=True)
class Page:
    """One picture: panels of one subject and phase."""

    name: str  # file name without .png
    title: str
    panels: tuple[Panel, ...]
    phase: str = RL
    needs: str = ""  # the page is made only for runs with this metric


def _clip_panel(unit: str) -> Panel:
    keys = tuple(f"clip/{unit}/{kind}" for kind in ("binding", "outside", "low", "high"))
    return Panel(f"Clipped {unit}s", f"share of {unit}s", keys, percent=True)


_CROSS_ENTROPY = "cross-entropy, nats per token"
_REWARD = Panel("Reward", "mean reward", ("reward/mean",))
_ACCURACY = Panel("Held-out accuracy", "share right", ("evaluation/accuracy",), percent=True)
_ENTROPY = Panel("Entropy", "nats per token", ("policy/entropy",))
_GRAD_NORM = Panel("Gradient norm", "norm before clipping", ("grad_norm",), log=True)
_LEARNING_RATE = Panel("Learning rate", "learning rate", ("lr",), noisy=False)
_LENGTH = Panel("Response length", "tokens", ("response/length_mean", "response/length_p90"))
_THROUGHPUT = Panel("Throughput", "tokens per second", ("perf/tokens_per_second",))
_TIME = Panel("Time of a step", "seconds", ("perf/step_seconds",))
_VOLATILITY = Panel(
    "Routing volatility",
    "share changed",
    ("routing/volatility", "routing/tokens_changed"),
    percent=True,
)
_MISMATCH = Panel(
    "Rollout against training",
    "log-prob difference",
    ("mismatch/abs_mean", "mismatch/k1", "mismatch/k3"),
)

_LEARNING = (
    _REWARD,
    _ACCURACY,
    Panel("Reward spread", "standard deviation", ("reward/std",)),
    Panel(
        "Wasted responses",
        "share",
        ("reward/zero_spread_groups", "response/truncated"),
        percent=True,
    ),
    _LENGTH,
    _ENTROPY,
)
_RATIOS = (
    Panel(
        "Sequence ratio", "ratio − 1", ("ratio/sequence/",), kind="fan", floor="ratio/noise_floor"
    ),
    _clip_panel("sequence"),
    Panel("Token ratio", "ratio − 1", ("ratio/token/",), kind="fan"),
    _clip_panel("token"),
)
# Signs that the policy games a reward model: the score rises, and divergence, length or repeated
# text rise, too.
_GAMING = (
    Panel("Score of the reward model", "mean score", ("reward_model/mean",)),
    Panel("Divergence from the start", "nats", ("kl/reference_k3", "kl/reference_k1")),
    _LENGTH,
    Panel("Repeated text", "share of the response", ("response/repeated",), percent=True),
    Panel("Reward to train on", "mean", ("reward/mean", "reward/shaped_mean")),
    Panel("Spread of the scores", "standard deviation", ("reward_model/std",)),
)
_OPTIMIZER = (
    Panel("Loss", "loss", ("loss",)),
    _GRAD_NORM,
    _LEARNING_RATE,
    Panel("Divergence", "nats", ("kl/",)),
    _MISMATCH,
)
_ROUTING = (
    _VOLATILITY,
    Panel("Load imbalance", "max violation", ("routing/max_violation",)),
    Panel("Dead experts", "experts", ("routing/dead_experts",)),
)
_EPISODES = (
    Panel("Turns and branches", "of an episode", ("environment/turns", "environment/branches")),
    Panel(
        "Written by the policy",
        "share of the response's tokens",
        ("environment/sampled_share",),
        percent=True,
    ),
    Panel("Failed episodes", "episodes", ("environment/errors",), noisy=False),
)
_TIMING = (
    Panel(
        "Time of a step",
        "seconds",
        tuple(f"perf/{part}_seconds" for part in ("rollout", "logprob", "train", "sync")),
        kind="stack",
        total="perf/step_seconds",
    ),
    _THROUGHPUT,
    Panel(
        "Idle",
        "share of the time",
        ("perf/trainer_idle_share", "perf/engines_idle_share"),
        percent=True,
    ),
    Panel("Peak memory", "GB", ("perf/peak_memory_bytes",), scale=1e-9),
)
_SUPERVISED = (
    Panel("Loss", _CROSS_ENTROPY, ("loss", "evaluation/loss")),
    _GRAD_NORM,
    _LEARNING_RATE,
    _THROUGHPUT,
)
_PREFERENCES = (
    Panel("Loss", "-log p(chosen), or squared error", ("loss", "evaluation/loss")),
    Panel(
        "Pairs in the right order",
        "share right",
        ("preference/accuracy", "evaluation/accuracy"),
        percent=True,
    ),
    Panel("Scores", "score", ("preference/chosen", "preference/rejected", "preference/score")),
    Panel("Held-out calibration error", "share", ("evaluation/calibration_error",), percent=True),
    Panel("Held-out correlation", "correlation", ("evaluation/correlation",)),
    _GRAD_NORM,
    _LEARNING_RATE,
    _THROUGHPUT,
)
_PAGES = (
    Page("learning", "Learning", _LEARNING),
    Page("gaming", "Reward model, and signs that it is gamed", _GAMING, needs="reward_model/mean"),
    Page("episodes", "Episodes", _EPISODES),
    Page("ratios", "Importance ratios and clipping", _RATIOS),
    Page("optimizer", "Optimizer", _OPTIMIZER),
    Page("routing", "Expert routing", _ROUTING),
    Page("timing", "Time and memory", _TIMING),
    Page(PRETRAINING, "Pre-training", _SUPERVISED, PRETRAINING),
    Page(FINE_TUNING, "Supervised fine-tuning", _SUPERVISED, FINE_TUNING),
    Page(PREFERENCES, "Preference model", _PREFERENCES, PREFERENCES),
)

_COMPARED_RL = (
    _REWARD,
    _ACCURACY,
    _ENTROPY,
    _clip_panel("sequence"),
    _clip_panel("token"),
    _GRAD_NORM,
    _LENGTH,
    _VOLATILITY,
    _TIME,
)
_COMPARED_SUPERVISED = (
    Panel("Held-out loss", _CROSS_ENTROPY, ("evaluation/loss",)),
    Panel("Loss", _CROSS_ENTROPY, ("loss",)),
    _GRAD_NORM,
    _LEARNING_RATE,
    _THROUGHPUT,
    _TIME,
)
# The page of a comparison, by the phase of the runs.
COMPARISONS = {
    RL: Page("comparison", "Comparison", _COMPARED_RL),
    PRETRAINING: Page("comparison", "Comparison: pre-training", _COMPARED_SUPERVISED, PRETRAINING),
    FINE_TUNING: Page(
        "comparison", "Comparison: supervised fine-tuning", _COMPARED_SUPERVISED, FINE_TUNING
    ),
    PREFERENCES: Page("comparison", "Comparison: preference models", _PREFERENCES, PREFERENCES),
}
ABLATION = Page(
    "variants",
    "Variants: each seed, and the mean over seeds",
    (
        *_COMPARED_RL,
        *(
            Panel(f"{unit.title()} ratio, {text}", "ratio", (f"ratio/{unit}/{name}",))
            for unit in ("token", "sequence")
            for name, text in (("p01", "1st percentile"), ("p99", "99th percentile"))
        ),
        Panel("Token ratio, largest", "ratio", ("ratio/token/max",), log=True),
        _MISMATCH,
        Panel("Tokens with a changed expert", "share", ("routing/tokens_changed",), percent=True),
    ),
)


# --- pictures -------------------------------------------------------------------------------------


def plot_run(run: Run, out: Path) -> list[Path]:
    """Write OUT/plots/*.png, one picture for each subject. Returns their paths.

    Subjects and panels without metrics in this run are left out. Dotted lines mark the steps at
    which values of the configuration changed. Raises DataError if the file of changes is damaged.
    """
    changes = read_changes(run.path)
    written = []
    with matplotlib.rc_context(STYLE):
        for page in _PAGES:
            panels = [panel for panel in page.panels if _present_keys(run, panel, page.phase)]
            if not panels or (page.needs and not run.series(page.needs, page.phase)[0]):
                continue
            borders = [each["step"] for each in changes if phase_of(each) == page.phase]
            columns = 2 if len(panels) in (2, 4) else 3
            title = f"{page.title}: {as_label(run.name)}"
            figure, all_axes = panel_grid(len(panels), title, columns)
            for axes, panel in zip(all_axes, panels):
                draw = {"lines": _draw_lines, "fan": _draw_fan, "stack": _draw_stack}[panel.kind]
                finish_axes(axes, panel.title, draw(axes, run, panel, page.phase))
                for step in borders:
                    axes.axvline(step + 0.5, color=MUTED, linewidth=0.8, linestyle=":", zorder=0)
                _add_legend(axes)
            fans = [axes for axes, panel in zip(all_axes, panels) if panel.kind == "fan"]
            if len(fans) > 1:
                _share_scale(fans)
            written.append(save_figure(figure, out / "plots" / f"{page.name}.png"))
    return written


def plot_comparison(runs: Sequence[Run], path: Path, page: Page) -> Path | None:
    """Write one picture with the panels of `page`, each with the curves of all runs.

    Runs of one group share a colour: a strong line for their mean, a faint line for each run.
    Panels without metrics are left out. Returns None if no panel is left.
    """
    panels = [p for p in page.panels if any(_present_keys(run, p, page.phase) for run in runs)]
    if not panels:
        return None
    with matplotlib.rc_context(STYLE):
        figure, all_axes = panel_grid(len(panels), page.title)
        for axes, panel in zip(all_axes, panels):
            _draw_runs(axes, runs, panel, page.phase)
        # One legend for all panels, which show the same runs in the same colours.
        entries: dict[str, Artist] = {}
        for axes in all_axes:
            handles, labels = axes.get_legend_handles_labels()
            entries = dict(zip(labels, handles)) | entries
        longest = max(map(len, entries), default=0) + 6  # with the line before the name
        fitting = int(figure.get_figwidth() / (longest * _LETTER_WIDTH))
        columns = max(1, min(len(entries), 4, fitting))
        figure.legend(
            entries.values(), entries, loc="outside lower left", ncols=columns, fontsize=9
        )
        return save_figure(figure, path)


def _present_keys(run: Run, panel: Panel, phase: str) -> list[str]:
    """Return the panel's keys with finite values in the run. A key with "/" at its end becomes the
    keys below it."""
    names = {name for record in run.records if phase_of(record) == phase for name in record}
    present: list[str] = []
    for key in panel.keys:
        below = sorted(name for name in names if name.startswith(key))
        present += below if key.endswith("/") else [key] * (key in names)
    return [key for key in present if np.isfinite(run.series(key, phase)[1]).any()]


def _label(key: str) -> str:
    name = key.rpartition("/")[2].removesuffix("_seconds").replace("_", " ")
    return f"held-out {name}" if key.startswith("evaluation/") else name


def _draw_lines(axes: Axes, run: Run, panel: Panel, phase: str) -> str:
    """Draw one curve for each key. Returns the y label, like the other `_draw` functions."""
    series = {key: run.series(key, phase) for key in _present_keys(run, panel, phase)}
    shown = [value * panel.scale for _, values in series.values() for value in values]
    factor, unit = (1.0, "") if panel.percent or panel.log else small_unit(shown)
    for (key, (steps, values)), color in zip(series.items(), cycle(PALETTE)):
        scaled = [value * panel.scale * factor for value in values]
        _draw_curve(axes, steps, scaled, color, _label(key), panel.noisy)
    _set_scale(axes, panel, shown)
    return panel.ylabel + unit


def _draw_fan(axes: Axes, run: Run, panel: Panel, phase: str) -> str:
    """Draw the median and the bands p01 to p99 and min to max, all minus one."""
    names = ("min", "p01", "p50", "p99", "max")
    steps, values = _aligned([run.series(f"{panel.keys[0]}{name}", phase) for name in names])
    # Two fans on a page share one scale (see _share_scale). The unit of a single fan is chosen for
    # this fan.
    lone = not (_has_fan(run, "sequence", phase) and _has_fan(run, "token", phase))
    scale, unit = small_unit((values - 1.0).ravel().tolist()) if lone else (1.0, "")
    lowest, low, median, high, highest = (values - 1.0) * scale
    color = PALETTE[0]
    axes.fill_between(steps, lowest, highest, color=color, alpha=0.12, lw=0, label="min to max")
    axes.fill_between(steps, low, high, color=color, alpha=0.28, lw=0, label="p01 to p99")
    axes.plot(steps, median, color=color, label="median")
    floor_steps, floor = run.series(panel.floor, phase)
    for sign, label in ((1, "noise floor"), (-1, None)):
        if floor_steps:
            heights = sign * np.asarray(floor) * scale
            axes.plot(floor_steps, heights, color=MUTED, lw=1, ls=(0, (3, 2)), label=label)
    return panel.ylabel + unit


def _has_fan(run: Run, unit: str, phase: str) -> bool:
    return bool(run.series(f"ratio/{unit}/p50", phase)[0])


def _share_scale(all_axes: Sequence[Axes]) -> None:
    """Give all fans the same vertical scale, so that their widths can be compared.

    The scale is linear around 0, as far as the narrowest fan reaches, and logarithmic beyond."""
    widths = [max(map(abs, axes.dataLim.intervaly)) for axes in all_axes]
    widths = [width for width in widths if math.isfinite(width) and width > 0]
    if not widths:
        return
    for axes in all_axes:
        axes.set_yscale("symlog", linthresh=min(widths))
        axes.set_ylim(-1.1 * max(widths), 1.1 * max(widths))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))


def _draw_stack(axes: Axes, run: Run, panel: Panel, phase: str) -> str:
    present = _present_keys(run, panel, phase)
    steps, values = _aligned([run.series(key, phase) for key in present])
    layers = np.nan_to_num(values)
    labels = [f"{_label(k)} {mean:.2g} s" for k, mean in zip(present, layers.mean(axis=1))]
    if len(steps) == 1:  # areas need two points
        steps, layers = [steps[0] - 0.25, steps[0] + 0.25], layers.repeat(2, axis=1)
    axes.stackplot(steps, layers, labels=labels, colors=PALETTE, alpha=0.85, linewidth=0)
    axes.plot(*run.series(panel.total, phase), color=INK, linewidth=0.8, label="whole step")
    axes.set_ylim(bottom=0)
    return panel.ylabel


def _draw_runs(axes: Axes, runs: Sequence[Run], panel: Panel, phase: str) -> None:
    shown: list[float] = []
    title = panel.title
    for index, (name, members) in enumerate(groups(runs).items()):
        color, style = PALETTE[index % len(PALETTE)], _STYLES[index // len(PALETTE) % len(_STYLES)]
        curves = []
        for run in members:
            for key in _present_keys(run, panel, phase)[:1]:
                steps, values = run.series(key, phase)
                curves.append((steps, [value * panel.scale for value in values]))
                if len(panel.keys) > 1 and _label(key) not in title.lower():
                    title = f"{panel.title}: {_label(key)}"
        if len(curves) == 1:
            _draw_curve(axes, *curves[0], color, as_label(name), style=style)
        elif curves:
            for steps, values in curves:
                axes.plot(steps, smoothed(values), color=color, linewidth=0.9, alpha=0.35, ls=style)
            steps, values = _aligned(curves)
            label = f"{as_label(name)} (mean of {len(curves)})"
            mean = smoothed(values.mean(axis=0))
            axes.plot(steps, mean, color=color, label=label, linewidth=2.1, ls=style)
        shown.extend(value for _, values in curves for value in values)
    _set_scale(axes, panel, shown)
    finish_axes(axes, title, panel.ylabel)


def _aligned(curves: Sequence[tuple[list[int], list[float]]]) -> tuple[list[int], np.ndarray]:
    """Return the steps that all curves have, and the values there as [num_curves, num_steps].

    A curve is (steps, values)."""
    tables: list[Mapping[int, float]] = [dict(zip(*curve)) for curve in curves]
    steps = sorted(set.intersection(*map(set, tables)))
    return steps, np.array([[table[step] for step in steps] for table in tables])


# --- axes and curves ------------------------------------------------------------------------------


def panel_grid(count: int, title: str, columns: int = 3) -> tuple[Figure, list[Axes]]:
    """Return a figure with `count` small panels. Call it inside `matplotlib.rc_context(STYLE)`."""
    columns = min(columns, count)
    rows = math.ceil(count / columns)
    width = max(1.25, columns) * _PANEL_WIDTH
    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1, wspace=0.02, hspace=0.04)
    figure = Figure(figsize=(width, rows * _PANEL_HEIGHT + 0.45), layout=layout)
    figure.suptitle(title, x=0.012, ha="left", fontsize=12.5, fontweight="bold", color=INK)
    return figure, [figure.add_subplot(rows, columns, index + 1) for index in range(count)]


def as_label(name: str) -> str:
    """Return a name of a run for a title or a legend. Matplotlib would read a text between two
    dollar signs as a formula, and cannot draw the bytes of a file name that are no UTF-8."""
    drawn = name.encode("utf-8", errors="replace").decode()
    return drawn.replace("$", r"\$")


def finish_axes(axes: Axes, title: str, ylabel: str, xlabel: str = "step") -> None:
    axes.set_title(title)
    axes.set_ylabel(ylabel)
    axes.set_xlabel(xlabel)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.margins(x=0.015)


def _add_legend(axes: Axes) -> None:
    """Add a legend above the panel if it has more than one label."""
    labels = axes.get_legend_handles_labels()[1]
    if len(labels) > 1:
        columns = 4 if sum(map(len, labels)) <= 40 else 3  # limited by the width of the panel
        axes.legend(
            loc="lower left",
            bbox_to_anchor=(-0.01, 0.985),
            ncols=min(len(labels), columns),
            borderaxespad=0.1,
            handlelength=1.3,
            handletextpad=0.5,
            columnspacing=1.2,
        )
        axes.set_title(axes.get_title("left"), pad=6 + 14 * math.ceil(len(labels) / columns))


def _set_scale(axes: Axes, panel: Panel, values: Sequence[float]) -> None:
    """Set the vertical axis of a percent or log panel.

    A percent axis begins at 0. A log panel gets a logarithmic axis if the values are positive and
    span at least a factor of 10."""
    finite = [value for value in values if math.isfinite(value)]
    if panel.percent:
        top = max(finite, default=0.0)
        axes.set_ylim(0, min(1.03, 1.12 * top) if top > 0 else 0.01)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{100 * y:.3g}%"))
    elif panel.log and finite and 0 < 10 * min(finite) <= max(finite):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())


def small_unit(values: Sequence[float]) -> tuple[float, str]:
    """Return a factor that brings small values to order one, and its text for the axis label."""
    largest = max((abs(value) for value in values if math.isfinite(value)), default=0.0)
    if largest == 0 or largest >= 0.01:
        return 1.0, ""
    exponent = math.floor(math.log10(largest))
    return 10.0**-exponent, f"  ($\\times 10^{{{exponent}}}$)"


def smoothed(values: Sequence[float] | np.ndarray) -> np.ndarray:
    """Return a centred moving average of the finite values over a fifteenth of the curve.

    A short curve is returned unchanged. The result is NaN where the window has no finite value.
    """
    data = np.asarray(values, dtype=float)
    if len(values) < _SMOOTH_FROM:
        return data
    finite = np.isfinite(data)
    window = np.ones(2 * max(1, len(values) // 30) + 1)
    # The sum is divided by the number of values in the window, because the window is shorter at
    # both ends of the curve.
    counts = np.convolve(finite, window, "same")
    sums = np.convolve(np.where(finite, data, 0.0), window, "same")
    return np.where(counts > 0.5, sums / np.maximum(counts, 1.0), np.nan)


def _draw_curve(
    axes: Axes,
    steps: Sequence[int],
    values: Sequence[float],
    color: str,
    label: str,
    noisy: bool = True,
    style: str = "-",
) -> None:
    """Draw a line. A long noisy curve is drawn faint, with its moving average on top.

    Steps whose value was not finite are marked at the bottom of the panel.
    """
    if noisy and len(values) >= _SMOOTH_FROM:
        axes.plot(steps, values, color=color, linewidth=0.8, alpha=0.3)
        axes.plot(steps, smoothed(values), color=color, label=label, ls=style)
    else:
        marker = "o" if len(steps) <= 20 else None
        axes.plot(steps, values, color=color, label=label, marker=marker, markersize=3.5, ls=style)
    broken = [step for step, value in zip(steps, values) if not math.isfinite(value)]
    if broken:
        bottom = axes.get_xaxis_transform()
        heights = [0.03] * len(broken)
        axes.plot(broken, heights, "x", transform=bottom, color=_RED, ms=5, label="not finite")


def save_figure(figure: Figure, path: Path) -> Path:
    """Write a picture. Raises DataError if it cannot be written."""
    with os_errors(path, "cannot be written"):
        make_folder(path.parent)
        figure.savefig(path, dpi=_DPI)
    return path
