from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from gspo_megatron.errors import DataError
from gspo_megatron.observe.metrics_files import (
    MetricsWriter,
    group_name,
    groups,
    load_runs,
    run_names,
)
from gspo_megatron.observe.plots import (
    COMPARISONS,
    plot_comparison,
    plot_run,
    small_unit,
    smoothed,
)

RunMaker = Callable[..., Path]

PNG = b"\x89PNG\r\n\x1a\n"


def test_a_run_gets_a_picture_for_each_subject_it_has_figures_of(make_run: RunMaker) -> None:
    run_dir = make_run("run")
    written = plot_run(run_dir)
    names = ["learning", "ratios", "optimizer", "routing", "timing"]
    assert written == [run_dir / "plots" / f"{name}.png" for name in names]
    assert all(path.read_bytes().startswith(PNG) for path in written)


def test_subjects_without_figures_are_left_out(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.write({"step": 1, "reward/mean": 0.5})
    assert [path.stem for path in plot_run(tmp_path)] == ["learning"]


def test_a_run_without_steps_gets_no_picture(tmp_path: Path) -> None:
    MetricsWriter(tmp_path).close()
    assert plot_run(tmp_path) == []


def test_one_step_and_figures_that_are_not_finite_can_be_drawn(make_run: RunMaker) -> None:
    run_dir = make_run("run", steps=1)
    with MetricsWriter(run_dir) as writer:
        writer.write({"step": 2, "loss": math.nan, "grad_norm": math.inf, "lr": math.nan})
    assert "optimizer" in [path.stem for path in plot_run(run_dir)]


def test_ratios_that_are_exactly_one_can_be_drawn(tmp_path: Path) -> None:
    quantiles = {f"ratio/sequence/{name}": 1.0 for name in ("min", "p01", "p50", "p99", "max")}
    with MetricsWriter(tmp_path) as writer:
        for step in (1, 2):
            writer.write({"step": step, **quantiles, "clip/sequence/binding": 0.0})
    assert [path.stem for path in plot_run(tmp_path)] == ["ratios"]


def test_plotting_leaves_matplotlib_as_it_was(make_run: RunMaker) -> None:
    import matplotlib

    before = dict(matplotlib.rcParams)
    plot_run(make_run("run"))
    assert dict(matplotlib.rcParams) == before


def test_a_damaged_run_is_told(make_run: RunMaker) -> None:
    run_dir = make_run("run")
    path = run_dir / "metrics.jsonl"
    path.write_bytes(b"{\n" + path.read_bytes())
    with pytest.raises(DataError, match="metrics.jsonl:1: "):
        plot_run(run_dir)


def test_runs_of_different_lengths_and_figures_are_compared(make_run: RunMaker) -> None:
    paths = [make_run("gspo_seed1"), make_run("gspo_seed2", steps=4), make_run("grpo", steps=50)]
    picture = plot_comparison(load_runs(paths), paths[0].parent / "c.png", COMPARISONS["rl"])
    assert picture is not None and picture.read_bytes().startswith(PNG)


def test_runs_with_nothing_in_common_to_show_have_no_comparison(tmp_path: Path) -> None:
    for name in ("a", "b"):
        MetricsWriter(tmp_path / name).close()
    assert (
        plot_comparison(
            load_runs([tmp_path / "a", tmp_path / "b"]), tmp_path / "c.png", COMPARISONS["rl"]
        )
        is None
    )


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("gspo_seed1", "gspo"),
        ("gspo-seed=12", "gspo"),
        ("seed3", ""),
        ("gspo/seed3", "gspo"),
        ("seed3/gspo", "gspo"),
        ("gspo_s4_lr", "gspo_lr"),
        ("tiny_cpu", "tiny_cpu"),
        ("steps100", "steps100"),
        ("reseed1", "reseed1"),
    ],
)
def test_the_group_is_the_name_without_the_seed(name: str, group: str) -> None:
    assert group_name(name) == group


def test_runs_are_named_by_what_tells_them_apart() -> None:
    assert run_names([Path("/r/a"), Path("/r/b")]) == ["a", "b"]
    assert run_names([Path("/r/a/x"), Path("/r/b/x")]) == ["a/x", "b/x"]
    assert run_names([Path("/r/a/seed1"), Path("/r/b/seed2")]) == ["a/seed1", "b/seed2"]


def test_bare_seeds_of_one_folder_are_one_group_of_its_name(make_run: RunMaker) -> None:
    runs = load_runs([make_run("gspo/seed1"), make_run("gspo/seed2")])
    assert {name: len(members) for name, members in groups(runs).items()} == {"gspo": 2}


def test_a_run_given_twice_is_refused(make_run: RunMaker) -> None:
    run_dir = make_run("run")
    with pytest.raises(DataError, match="given twice"):
        load_runs([run_dir, run_dir / ".." / "run"])


def test_smoothing_is_the_mean_of_the_finite_values_in_the_window() -> None:
    values = np.random.default_rng(7).normal(size=91)
    values[[0, 40, 41]] = np.nan
    smooth = smoothed(values.tolist())
    half = 91 // 30
    for index in range(91):
        expected = np.nanmean(values[max(0, index - half) : index + half + 1])
        # float64 sums of seven values in another order
        assert smooth[index] == pytest.approx(expected, abs=1e-12)


def test_short_curves_are_not_smoothed() -> None:
    assert smoothed([1.0] * 39).tolist() == [1.0] * 39


def test_small_values_are_brought_to_order_one() -> None:
    factor, unit = small_unit([2e-4, -3e-5, math.nan])
    assert factor == pytest.approx(1e4) and "10^{-4}" in unit
    assert small_unit([0.5]) == (1.0, "") and small_unit([0.0]) == (1.0, "")
