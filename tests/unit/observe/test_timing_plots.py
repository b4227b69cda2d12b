"""The timeline of a run with servers: the pictures, and the spans that they show."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from gspo_megatron.observe.metrics_files import MetricsWriter, load_runs
from gspo_megatron.observe.plots import PALETTE
from gspo_megatron.observe.report import write_report
from gspo_megatron.observe.timing_plots import Span, plot_timeline, timeline

# A step of 10 s: 4 s of waiting, 1 s for log-probs, 3 s of training, 1.5 s for new weights, and 0.5
# s between these phases.
STEP = {"rollout": 4.0, "logprob": 1.0, "train": 3.0, "sync": 1.5, "step": 10.0}


def write_run(folder: Path, steps: int, **further: float) -> Path:
    with MetricsWriter(folder) as metrics:
        metrics.write({"step": 0, "evaluation/accuracy": 0.5})
        for step in range(1, steps + 1):
            seconds = {f"perf/{name}_seconds": value for name, value in STEP.items()}
            metrics.write({"step": step, "reward/mean": 0.1, **seconds, **further})
    return folder


def test_servers_draw_while_the_trainer_waits(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 15, **{"sync/seconds": 1.4})
    spans, starts = timeline(load_runs([run])[0])
    assert starts == {step: 10.0 * (step - 4) for step in range(4, 16)}
    second = [span for span in spans if 10 <= span.start < 20]
    assert second == [
        Span("trainer", "waits for responses", 10, 14),
        Span("servers", "draws responses", 10, 14),
        Span("trainer", "old log-probs", 14, 15),
        Span("trainer", "trains", 15, 18),
        Span("trainer", "new weights", 18, 19.5),
        Span("servers", "new weights", 18, 19.5),
    ]


@pytest.mark.parametrize(("share", "end"), [(0.3, None), (0.6, 6.0), (1.0, 8.0)])
def test_servers_draw_ahead(tmp_path: Path, share: float, end: float | None) -> None:
    """The trainer waits for 4 s. If the busy share is above 40%, the servers generate for longer
    than this wait, at most until the new weights at 8 s."""
    told = {"sync/seconds": 1.4, "engine/busy_share": share}
    spans, _ = timeline(load_runs([write_run(tmp_path / "run", 1, **told)])[0])
    ahead = [span for span in spans if span.what == "draws ahead"]
    assert ahead == ([] if end is None else [Span("servers", "draws ahead", 4, end)])


def test_a_run_without_servers_has_no_timeline(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 3)
    assert plot_timeline(load_runs([run])[0], tmp_path / "timeline.png") is None
    assert "timeline" not in write_report([run], tmp_path / "report").read_text()


@pytest.mark.parametrize("steps", [1, 12])
def test_the_report_shows_who_worked_when(tmp_path: Path, steps: int) -> None:
    run = write_run(tmp_path / "run", steps, **{"sync/seconds": 1.4})
    page = write_report([run], tmp_path / "report").read_text()
    assert 'alt="timeline"' in page
    pixels = imread(tmp_path / "report" / "plots" / "timeline.png")[..., :3].reshape(-1, 3)
    counts = {
        what: (np.abs(pixels - to_rgb(color)).max(1) < 0.01).sum()
        for what, color in {
            "trains": PALETTE[0],
            "new weights": PALETTE[1],
            "draws": PALETTE[2],
            "logprobs": PALETTE[7],
        }.items()
    }
    # The areas in the picture are proportional to the seconds. The legend and the lines between the
    # steps add some pixels to these areas.
    assert counts["draws"] / counts["trains"] == pytest.approx(4 / 3, rel=0.1)
    assert counts["new weights"] / counts["trains"] == pytest.approx(2 * 1.5 / 3, rel=0.1)
    assert counts["logprobs"] / counts["trains"] == pytest.approx(1 / 3, rel=0.15)
