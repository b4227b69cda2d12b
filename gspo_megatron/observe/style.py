"""How the plots look: one palette, light grid, titles on the left, no pyplot and so no state."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

# Told apart with the common colour vision deficiencies and in grey print.
PALETTE = ("#2563a8", "#e07b28", "#2a9d77", "#c2415c", "#7a5bb0", "#5f6b7a", "#b8922a", "#3aa6c4")
INK = "#22303c"
MUTED = "#66727f"
GRID = "#e6e9ed"

_PANEL_WIDTH = 4.2  # inches
_PANEL_HEIGHT = 2.75
_DPI = 140
_SMOOTH_FROM = 40  # curves of fewer points are drawn as they are

STYLE = {
    "font.family": "DejaVu Sans",  # comes with matplotlib, so pictures are the same everywhere
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
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "lines.linewidth": 1.7,
    "lines.solid_capstyle": "round",
    "legend.frameon": False,
    "legend.fontsize": 8,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
}


def panel_grid(count: int, title: str, columns: int = 3) -> tuple[Figure, list[Axes]]:
    """A figure of `count` small panels; call it and draw inside `matplotlib.rc_context(STYLE)`."""
    columns = min(columns, count)
    rows = math.ceil(count / columns)
    figure = Figure(
        figsize=(max(1.25 * _PANEL_WIDTH, columns * _PANEL_WIDTH), rows * _PANEL_HEIGHT + 0.45),
        layout="constrained",
    )
    FigureCanvasAgg(figure)
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1, wspace=0.02, hspace=0.04)  # type: ignore[union-attr]
    figure.suptitle(title, x=0.012, ha="left", fontsize=12.5, fontweight="bold", color=INK)
    axes = [figure.add_subplot(rows, columns, index + 1) for index in range(count)]
    return figure, axes


def dress(axes: Axes, title: str, ylabel: str, xlabel: str = "step") -> None:
    """Title, labels, ticks and, above the panel, the legend when there is something to tell."""
    handles, labels = axes.get_legend_handles_labels()
    rows = 0
    if len(labels) > 1:
        columns = 4 if sum(map(len, labels)) <= 40 else 3  # what fits over a panel
        rows = math.ceil(len(labels) / columns)
        axes.legend(
            handles,
            labels,
            loc="lower left",
            bbox_to_anchor=(-0.01, 0.985),
            ncols=min(len(labels), columns),
            borderaxespad=0.1,
            handlelength=1.3,
            handletextpad=0.5,
            columnspacing=1.2,
        )
    axes.set_title(title, pad=6 + 14 * rows)
    axes.set_ylabel(ylabel)
    axes.set_xlabel(xlabel)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.margins(x=0.015)


def as_percent(axes: Axes, values: Sequence[float]) -> None:
    """A vertical axis of shares: from nothing to the largest, in percent."""
    finite = [value for value in values if math.isfinite(value)]
    top = max(finite, default=0.0)
    axes.set_ylim(0, min(1.03, 1.12 * top) if top > 0 else 0.01)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{100 * y:.3g}%"))


def log_scale_if_wide(axes: Axes, values: Sequence[float]) -> None:
    """A logarithmic vertical axis when the values are positive and span a decade or more."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite or min(finite) <= 0 or max(finite) < 10 * min(finite):
        return
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def small_unit(values: Sequence[float]) -> tuple[float, str]:
    """A factor that brings small values to order one, and how the axis label tells it."""
    largest = max((abs(value) for value in values if math.isfinite(value)), default=0.0)
    if largest == 0 or largest >= 0.01:
        return 1.0, ""
    exponent = math.floor(math.log10(largest))
    return 10.0**-exponent, f"  ($\\times 10^{{{exponent}}}$)"


def smoothed(values: Sequence[float]) -> np.ndarray | None:
    """A centred moving average over a fifteenth of the curve, over what is finite.

    None for a short curve. NaN where nothing within the window is finite.
    """
    if len(values) < _SMOOTH_FROM:
        return None
    data = np.asarray(values, dtype=float)
    finite = np.isfinite(data)
    half = max(1, len(values) // 30)
    window = np.ones(2 * half + 1)
    # Dividing by how many values count shortens the window at both ends instead of padding it.
    counts = np.convolve(finite, window, "same")
    sums = np.convolve(np.where(finite, data, 0.0), window, "same")
    return np.where(counts > 0.5, sums / np.maximum(counts, 1.0), np.nan)


def draw_curve(
    axes: Axes,
    steps: Sequence[int],
    values: Sequence[float],
    color: str,
    label: str | None = None,
    noisy: bool = True,
) -> None:
    """A line; a noisy one of many points is drawn faint with its moving average over it.

    Steps whose value was not finite are marked at the foot of the panel.
    """
    smooth = smoothed(values) if noisy else None
    marker = "o" if len(steps) <= 20 else None
    if smooth is None:
        axes.plot(steps, values, color=color, label=label, marker=marker, markersize=3.5)
    else:
        axes.plot(steps, values, color=color, linewidth=0.8, alpha=0.3)
        axes.plot(steps, smooth, color=color, label=label)
    broken = [step for step, value in zip(steps, values) if not math.isfinite(value)]
    if broken:
        axes.plot(
            broken,
            [0.03] * len(broken),
            transform=axes.get_xaxis_transform(),
            color="#b3261e",
            linestyle="none",
            marker="x",
            markersize=5,
            label="not finite",
        )


def save(figure: Figure, path: Path) -> Path:
    """Write a PNG and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=_DPI)
    return path


def styled() -> matplotlib.rc_context:  # type: ignore[valid-type]
    """The context in which figures are made."""
    return matplotlib.rc_context(STYLE)
