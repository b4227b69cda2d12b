"""Plot a run whose reward is a preference model: the score of this model, the score of the true
rule, and the lengths of responses.

python examples/preferences/plot.py RUN [RUN ...] -o FILE.png

The script also prints the step at which the score of the true rule stops rising. Several runs
(seeds) are drawn into one plot.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from gspo_megatron.errors import DataError
from gspo_megatron.observe.metrics_files import read_metrics
from gspo_megatron.process.failures import run_script

SMOOTHED = 9  # steps
PANELS = (
    ("reward/model", "score of the preference model"),
    ("reward/true_score", "true rule's score"),
    ("response/length_mean", "tokens of a response"),
)


def curves(run: Path) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return the steps of a run, and each metric as smoothed values. Raises DataError."""
    records = [each for each in read_metrics(run) if all(name in each for name, _ in PANELS)]
    if not records:
        raise DataError(f"{run}: its metrics lack {PANELS[0][0]} or {PANELS[1][0]}")
    steps = np.array([each["step"] for each in records])
    return steps, {name: smooth(np.array([each[name] for each in records])) for name, _ in PANELS}


def smooth(values: np.ndarray) -> np.ndarray:
    """Return means over windows of SMOOTHED steps. At both ends the windows are shorter."""
    weights = np.ones(SMOOTHED)
    count = np.convolve(np.ones(len(values)), weights)
    half = SMOOTHED // 2
    return (np.convolve(values, weights) / count)[half : half + len(values)]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE")
    given = parser.parse_args(arguments)
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(PANELS), 1, sharex=True, figsize=(6.4, 6.4))
    for number, run in enumerate(given.runs):
        steps, found = curves(run)
        color, peak = f"C{number}", int(found["reward/true_score"].argmax())
        for (name, label), axis in zip(PANELS, axes, strict=True):
            axis.plot(steps, found[name], color=color, label=run.name)
            axis.axvline(steps[peak], color=color, linewidth=0.8, linestyle=":")
            axis.set_ylabel(label, fontsize="small")
        told = " ".join(
            f"{name.rpartition('/')[2]}={values[0]:.3f},{values[peak]:.3f},{values[-1]:.3f}"
            for name, values in found.items()
        )
        print(f"run={run.name} steps={steps[-1]} peak={steps[peak]} first,peak,last: {told}")
    axes[-1].set_xlabel("step")
    axes[0].set_title("dotted: the true score is highest", fontsize="small")
    if len(given.runs) > 1:
        axes[0].legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(given.output, dpi=110)


if __name__ == "__main__":
    sys.exit(run_script(main))
