"""Pictures of an ablation: curves of all arms over each other, and volatility by layer."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from gspo_megatron.observe.ablation import Band, LoadedArm, band
from gspo_megatron.observe.plots import share_legend
from gspo_megatron.observe.style import (
    PALETTE,
    as_percent,
    dress,
    log_scale_if_wide,
    panel_grid,
    save,
    smoothed,
    styled,
)

_LAYER_KEY = re.compile(r"routing/layer_(\d+)/volatility")


@dataclass(frozen=True)
class _Panel:
    title: str
    ylabel: str
    key: str
    percent: bool = False
    log: bool = False


_PANELS = (
    _Panel("Reward", "mean reward", "reward/mean"),
    _Panel("Held-out accuracy", "share right", "evaluation/accuracy", percent=True),
    _Panel("Entropy", "nats per token", "policy/entropy"),
    _Panel("Clipped tokens", "share of tokens", "clip/token/binding", percent=True),
    _Panel("Clipped sequences", "share of sequences", "clip/sequence/binding", percent=True),
    _Panel("Gradient norm", "norm before clipping", "grad_norm", log=True),
    _Panel("Token ratio, 1st percentile", "ratio", "ratio/token/p01"),
    _Panel("Token ratio, 99th percentile", "ratio", "ratio/token/p99"),
    _Panel("Token ratio, largest", "ratio", "ratio/token/max", log=True),
    _Panel("Sequence ratio, 1st percentile", "ratio", "ratio/sequence/p01"),
    _Panel("Sequence ratio, 99th percentile", "ratio", "ratio/sequence/p99"),
    _Panel("Mismatch, trainer to rollout", "mean log-prob difference", "mismatch/abs_mean"),
    _Panel("Routing volatility", "share of choices", "routing/volatility", percent=True),
    _Panel("Tokens with a changed expert", "share", "routing/tokens_changed", percent=True),
    _Panel("Time of a step", "seconds", "perf/step_seconds"),
)


def plot_arms(arms: Sequence[LoadedArm], path: Path) -> Path | None:
    """The main figures of all arms, each its mean over seeds in a band of one standard deviation.

    Panels of which no arm has figures are left out; returns None when that is all of them.
    """
    bands = {panel: [band(arm, panel.key) for arm in arms] for panel in _PANELS}
    shown = [panel for panel in _PANELS if any(bands[panel])]
    if not shown:
        return None
    with styled():
        figure, all_axes = panel_grid(len(shown), "Arms: mean and standard deviation over seeds")
        for axes, panel in zip(all_axes, shown, strict=True):
            values: list[float] = []
            for index, (arm, found) in enumerate(zip(arms, bands[panel], strict=True)):
                if found is not None:
                    color = PALETTE[index % len(PALETTE)]
                    values += _draw_band(axes, found, color, arm.name, log=panel.log)
            if panel.percent:
                as_percent(axes, values)
            if panel.log:
                log_scale_if_wide(axes, values)
            dress(axes, panel.title, panel.ylabel)
        share_legend(figure, all_axes)
        return save(figure, path)


def _draw_band(axes: Axes, found: Band, color: str, label: str, *, log: bool) -> list[float]:
    """Returns what is drawn."""
    means, deviations = np.asarray(found.means), np.asarray(found.deviations)
    smooth, spread = smoothed(found.means), smoothed(found.deviations)
    if smooth is not None and spread is not None:
        means, deviations = smooth, spread
    marker = "o" if len(found.steps) <= 20 else None
    axes.plot(found.steps, means, color=color, label=label, marker=marker, markersize=3)
    low, high = means - deviations, means + deviations
    if log and np.isfinite(means).any():  # a mean less its deviation may have no place there
        low = np.maximum(low, np.nanmin(means))
    axes.fill_between(found.steps, low, high, color=color, alpha=0.12, lw=0)
    return means.tolist()


def layers_of(arm: LoadedArm) -> dict[int, str]:
    """The layers whose volatility the arm's runs measured, with their keys."""
    keys = {key for run in arm.runs.values() for record in run.records for key in record}
    found = {int(match[1]): match[0] for match in map(_LAYER_KEY.fullmatch, keys) if match}
    return dict(sorted(found.items()))


def plot_volatility(arms: Sequence[LoadedArm], path: Path) -> Path | None:
    """A heat map an arm, layers by steps, mean over seeds; all on one colour scale."""
    maps = {}
    for arm in arms:
        bands = {layer: band(arm, key) for layer, key in layers_of(arm).items()}
        rows = {layer: found for layer, found in bands.items() if found is not None}
        if rows:
            maps[arm.name] = rows
    if not maps:
        return None
    shares = [v for rows in maps.values() for found in rows.values() for v in found.means]
    top = max((share for share in shares if math.isfinite(share)), default=0.0)
    with styled():
        title = "Volatility by layer: share of expert choices that changed in a step"
        figure, all_axes = panel_grid(len(maps), title)
        for axes, (name, rows) in zip(all_axes, maps.items(), strict=True):
            steps = next(iter(rows.values())).steps
            image = axes.imshow(
                np.array([found.means for found in rows.values()]),
                aspect="auto",
                interpolation="nearest",
                cmap="viridis",
                vmin=0.0,
                vmax=top or 1.0,
                extent=(steps[0] - 0.5, steps[-1] + 0.5, len(rows) + 0.5, 0.5),
            )
            axes.grid(visible=False)
            dress(axes, name, "layer")
            axes.set_yticks(range(1, len(rows) + 1), [str(layer) for layer in rows])
        bar = figure.colorbar(image, ax=all_axes, shrink=0.8, pad=0.01)
        bar.outline.set_visible(False)  # type: ignore[operator]
        bar.ax.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g}%")
        return save(figure, path)
