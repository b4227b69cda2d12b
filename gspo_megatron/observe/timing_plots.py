"""Plots the timeline of a run with vLLM servers: what trainer and servers do at each time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from gspo_megatron.observe.metrics_files import RL, Run, phase_of
from gspo_megatron.observe.plots import (
    INK,
    MUTED,
    PALETTE,
    STYLE,
    as_label,
    finish_axes,
    save_figure,
)

_SHOWN_STEPS = 12
# The phases of a step in their order, each with the metric of its duration.
_PHASES = {
    "waits for responses": "perf/rollout_seconds",
    "old log-probs": "perf/logprob_seconds",
    "trains": "perf/train_seconds",
    "new weights": "perf/sync_seconds",
}
_BEFORE_WEIGHTS = tuple(key for what, key in _PHASES.items() if what != "new weights")
_COLORS = {
    "waits for responses": "#dfe3e8",
    "old log-probs": PALETTE[7],
    "trains": PALETTE[0],
    "draws responses": PALETTE[2],
    "draws ahead": PALETTE[3],
    "new weights": PALETTE[1],
}


class Span(NamedTuple):
    """One bar of the timeline: what the trainer or the servers did. Times are seconds since the
    first step that is shown."""

    who: str
    what: str
    start: float
    end: float


def timeline(run: Run) -> tuple[list[Span], dict[int, float]]:
    """Return the spans and the start times of the last steps. Both are empty for a run without
    servers.

    The phases of a step are shown end to end; time between phases is added at the end of the step.
    Evaluations and checkpoints are left out, as in perf/step_seconds. The servers generate while
    the trainer waits for responses. If engine/busy_share says that the servers were busy for longer
    than this wait, then they generated responses of later steps in the rest of the busy time. This
    rest is shown directly after the wait. Its length is measured; its position is not.
    """
    by_step = {r["step"]: r for r in run.records if phase_of(r) == RL and r.get("sync/seconds")}
    spans: list[Span] = []
    starts: dict[int, float] = {}
    now = 0.0
    for step in sorted(by_step)[-_SHOWN_STEPS:]:
        record = by_step[step]
        starts[step], at = now, now
        busy_until = now + (record.get("engine/busy_share") or 0.0) * _seconds(record)
        ahead = min(busy_until, now + sum(record.get(key) or 0.0 for key in _BEFORE_WEIGHTS))
        for what, key in _PHASES.items():
            end = at + (record.get(key) or 0.0)
            spans.append(Span("trainer", what, at, end))
            if what == "new weights":
                spans.append(Span("servers", what, at, end))
            elif what == "waits for responses":
                spans.append(Span("servers", "draws responses", at, end))
                if ahead > end:
                    spans.append(Span("servers", "draws ahead", end, ahead))
            at = end
        now = max(at, now + _seconds(record))
    return spans, starts


def _seconds(record: Mapping[str, Any]) -> float:
    return float(record.get("perf/step_seconds") or 0.0)


def plot_timeline(run: Run, path: Path) -> Path | None:
    """Draw the timeline of a run into `path`. Returns None if the run has no timeline."""
    spans, starts = timeline(run)
    if not spans:
        return None
    rows = {"trainer": 1, "servers": 0}
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(12.6, 2.7), layout="constrained")
        title = f"Who worked when, by the last {len(starts)} steps: {as_label(run.name)}"
        figure.suptitle(title, x=0.012, ha="left", fontsize=12.5, fontweight="bold", color=INK)
        axes = figure.add_subplot()
        for who, what, start, end in spans:
            axes.barh(rows[who], end - start, 0.62, start, color=_COLORS[what], lw=0)
        for step, start in starts.items():
            axes.axvline(start, color=MUTED, lw=0.6)
            axes.text(start, 1.42, f" {step}", color=MUTED, fontsize=7.5)
        finish_axes(axes, "", "", "seconds since the first step shown")
        axes.grid(visible=False)
        axes.set_yticks(list(rows.values()), list(rows))
        axes.set_ylim(-0.45, 1.6)
        present = {span.what for span in spans if span.end > span.start}
        handles = [Patch(color=c, label=what) for what, c in _COLORS.items() if what in present]
        figure.legend(handles=handles, loc="outside lower left", ncols=len(handles))
        return save_figure(figure, path)
