"""Synthetic runs, that is, the files that a training run would have written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gspo_megatron.observe.metrics_files import (
    SAMPLES_FILE,
    JsonLinesWriter,
    MetricsWriter,
    sample_row,
)
from gspo_megatron.types import Sample

RunMaker = Callable[..., Path]


def rl_record(step: int, reward: float) -> dict[str, object]:
    record: dict[str, object] = {
        "phase": "rl",
        "step": step,
        "reward/mean": reward,
        "reward/std": 0.3,
        "reward/zero_spread_groups": 0.25,
        "loss": 1e-4 * (-1) ** step,
        "grad_norm": 0.5 + step,
        "lr": 1e-5,
        "policy/entropy": 1.0 / (1 + step),
        "kl/k3": 1e-3,
        "mismatch/abs_mean": 2e-3,
        "ratio/noise_floor": 1e-5,
        "clip/sequence/binding": 0.1,
        "clip/sequence/outside": 0.2,
        "routing/volatility": 0.05,
        "perf/step_seconds": 2.0,
        "perf/rollout_seconds": 0.75,
        "perf/train_seconds": 1.0,
        "perf/tokens_per_second": 1000.0 + step,
        "perf/peak_memory_bytes": 2**30,
    }
    for name, offset in (("min", -3), ("p01", -2), ("p50", 0), ("p99", 2), ("max", 3)):
        record[f"ratio/sequence/{name}"] = 1 + offset * 1e-4
    if step % 2 == 0:
        record["evaluation/accuracy"] = reward - 0.05
    return record


@pytest.fixture
def make_run(tmp_path: Path) -> RunMaker:
    """A function that writes a run folder below tmp_path. The rewards are 0.1, 0.2, ... plus
    `bonus`."""

    def make(name: str, steps: int = 6, bonus: float = 0.0) -> Path:
        run_dir = tmp_path / name
        with MetricsWriter(run_dir) as metrics, JsonLinesWriter(run_dir / SAMPLES_FILE) as samples:
            for step in range(1, steps + 1):
                metrics.write(rl_record(step, 0.1 * step + bonus))
                row = sample_row(Sample(f"<b>{step}</b>", "7", "&seven", False), 0.5)
                samples.append({"step": step, **row})
        return run_dir

    return make
