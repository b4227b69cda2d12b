from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gspo_megatron.errors import DataError
from gspo_megatron.observe import plots
from gspo_megatron.observe.metrics_files import (
    CHANGES_FILE,
    JsonLinesWriter,
    MetricsWriter,
    Run,
    group_name,
    groups,
    load_runs,
    run_names,
)
from gspo_megatron.observe.plots import (
    COMPARISONS,
    plot_comparison,
    small_unit,
    smoothed,
)
from tests.unit.observe.conftest import RunMaker, rl_record

PNG = b"\x89PNG\r\n\x1a\n"


def plotted(folder: Path) -> list[Path]:
    [run] = load_runs([folder])
    return plots.plot_run(run, folder)


SUBJECTS = ["learning", "ratios", "optimizer", "routing", "timing"]
QUANTILES = {f"ratio/sequence/{name}": 1.0 for name in ("min", "p01", "p50", "p99", "max")}
BROKEN = {"step": 2, "loss": math.nan, "grad_norm": math.inf, "lr": math.nan}


@pytest.mark.parametrize(
    ("records", "pictures"),
    [
        ([rl_record(step, 0.1) for step in range(1, 7)], SUBJECTS),
        ([rl_record(1, 0.1), BROKEN], SUBJECTS),
        ([{"step": 1, "reward/mean": 0.5}], ["learning"]),
        ([{"step": 1, "environment/turns": 2.5, "environment/errors": 0.0}], ["episodes"]),
        ([{"step": n, **QUANTILES, "clip/sequence/binding": 0.0} for n in (1, 2)], ["ratios"]),
        ([], []),
    ],
)
def test_a_run_gets_a_picture_for_each_subject_it_has_figures_of(
    tmp_path: Path, records: list[dict[str, object]], pictures: list[str]
) -> None:
    with MetricsWriter(tmp_path) as writer:
        for record in records:
            writer.write(record)
    written = plotted(tmp_path)
    assert written == [tmp_path / "plots" / f"{name}.png" for name in pictures]
    assert all(path.read_bytes().startswith(PNG) for path in written)


def test_a_run_with_a_reward_model_has_the_signs_of_gaming_on_one_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = {
        "reward_model/mean": 0.5,
        "reward_model/std": 1.0,
        "kl/reference_k3": 0.1,
        "response/length_mean": 12.0,
        "response/repeated": 0.2,
    }
    with MetricsWriter(tmp_path) as writer:
        for step in range(1, 7):
            writer.write(rl_record(step, 0.1) | watched)
    titles: list[str] = []
    native = plots.finish_axes
    monkeypatch.setattr(
        plots, "finish_axes", lambda *a, **k: titles.append(a[1]) or native(*a, **k)
    )
    assert tmp_path / "plots" / "gaming.png" in plotted(tmp_path)
    signs = ["Score of the reward model", "Divergence from the start", "Response length"]
    start = titles.index(signs[0])
    assert titles[start : start + 4] == [*signs, "Repeated text"]


def test_lines_mark_where_keys_have_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with MetricsWriter(tmp_path) as writer:
        for step in range(1, 7):
            writer.write(rl_record(step, 0.1))
    with JsonLinesWriter(tmp_path / CHANGES_FILE) as changes:
        changes.append({"phase": "sft", "step": 2, "changed": ["data.shuffle: true -> false"]})
        changes.append({"phase": "rl", "step": 4, "changed": ["rollout.top_p: 1.0 -> 0.9"]})
    drawn: list[float] = []
    native = Axes.axvline
    monkeypatch.setattr(Axes, "axvline", lambda *a, **k: drawn.append(a[1]) or native(*a, **k))
    plotted(tmp_path)
    assert drawn and set(drawn) == {4.5}  # between steps 4 and 5
    with JsonLinesWriter(tmp_path / CHANGES_FILE) as changes:
        changes.append({"phase": "rl"})
    with pytest.raises(DataError, match=r"changes\.jsonl: the `step` of record 3 is not a number"):
        plotted(tmp_path)


def test_the_90th_percentile_of_the_length_is_drawn_where_a_run_has_it() -> None:
    panel = next(p for p in COMPARISONS["rl"].panels if p.title == "Response length")
    keys = ["response/length_mean", "response/length_p90"]
    for present in (keys[:1], keys):
        run = Run(Path(), "a", "a", ({"step": 1, **dict.fromkeys(present, 7.0)},))
        assert plots._present_keys(run, panel, "rl") == present


def test_plotting_leaves_matplotlib_as_it_was(make_run: RunMaker) -> None:
    import matplotlib

    before = dict(matplotlib.rcParams)
    plotted(make_run("run"))
    assert dict(matplotlib.rcParams) == before


def test_runs_of_different_lengths_and_figures_are_compared(make_run: RunMaker) -> None:
    paths = [make_run("gspo_seed1"), make_run("gspo_seed2", steps=4), make_run("grpo", steps=50)]
    picture = plot_comparison(load_runs(paths), paths[0].parent / "c.png", COMPARISONS["rl"])
    assert picture is not None and picture.read_bytes().startswith(PNG)


def legend_of(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> dict[str, tuple[object, object]]:
    """The entries of the legend of a comparison: colour and style of the line of each name."""
    drawn: list[Figure] = []
    monkeypatch.setattr(plots, "save_figure", lambda figure, path: drawn.append(figure) or path)
    plot_comparison(load_runs(folders), Path("c.png"), COMPARISONS["rl"])
    [legend] = drawn[0].legends
    lines = zip(legend.get_texts(), legend.get_lines(), strict=True)
    return {text.get_text(): (line.get_color(), line.get_linestyle()) for text, line in lines}


def test_each_of_many_runs_has_a_line_of_its_own(
    make_run: RunMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = legend_of([make_run(f"run_{name}") for name in "abcdefghij"], monkeypatch)
    assert len(found) == len(set(found.values())) == 10


def test_the_legend_of_long_names_is_not_wider_than_the_picture(
    make_run: RunMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(plots, "save_figure", lambda figure, path: drawn.append(figure) or path)
    name = "tiny_cpu-name=grpo-clip_low=0.2-clip_high=0.27-{}".format
    for names in ([name(n) for n in "abcd"], ["x" * 120, "y"], list("abcd")):
        plot_comparison(load_runs([make_run(n) for n in names]), Path("c"), COMPARISONS["rl"])
        figure = drawn.pop()
        figure.draw_without_rendering()
        [legend] = figure.legends
        assert legend.get_window_extent().width <= figure.bbox.width
        if len(names[0]) == 1:  # short names are side by side
            assert legend._ncols == 4


def test_names_of_runs_are_no_formulas(make_run: RunMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [make_run(name) for name in (r"$\wrong$", "c_seed1", "c_seed2")]
    assert plotted(runs[0])
    assert plotted(make_run("a\udcff"))  # a byte that is no UTF-8
    assert list(legend_of(runs, monkeypatch)) == [r"\$\wrong\$", "c (mean of 2)"]
    monkeypatch.undo()
    picture = plot_comparison(load_runs(runs), runs[0].parent / "c.png", COMPARISONS["rl"])
    assert picture is not None and picture.read_bytes().startswith(PNG)


def test_runs_with_nothing_in_common_to_show_have_no_comparison(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        MetricsWriter(folder).close()
    assert plot_comparison(load_runs(folders), tmp_path / "c.png", COMPARISONS["rl"]) is None


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("gspo_seed1", "gspo"),
        ("gspo-seed=12", "gspo"),
        ("seed3", ""),
        ("gspo/seed3", "gspo"),
        ("seed3/gspo", "gspo"),
        ("gspo_s4_lr", "gspo_lr"),
        ("seed1_gspo", "gspo"),
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
        # The sums of seven float64 values differ by their order.
        assert smooth[index] == pytest.approx(expected, abs=1e-12)
    assert smoothed(values[1:39]).tolist() == values[1:39].tolist()  # a short curve is not smoothed


def test_small_values_are_brought_to_order_one() -> None:
    factor, unit = small_unit([2e-4, -3e-5, math.nan])
    assert factor == pytest.approx(1e4) and "10^{-4}" in unit
    assert small_unit([0.5]) == (1.0, "") and small_unit([0.0]) == (1.0, "")


def test_the_ratios_of_tokens_and_sequences_are_drawn_on_one_scale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ratios of sequences are a hundred times closer to 1 than those of tokens. The plot must
    show that."""
    drawn: dict[str, Figure] = {}

    def keep(figure: Figure, path: Path) -> Path:
        drawn[path.name] = figure
        return path

    monkeypatch.setattr(plots, "save_figure", keep)
    with MetricsWriter(tmp_path) as writer:
        for step in (1, 2, 3):
            record = {"step": step}
            for unit, width in (("sequence", 1e-3), ("token", 0.1)):
                for name, place in (("min", -2), ("p01", -1), ("p50", 0), ("p99", 1), ("max", 2)):
                    record[f"ratio/{unit}/{name}"] = 1 + place * width
            writer.write(record)
    plotted(tmp_path)
    sequence, token = drawn["ratios.png"].axes
    assert sequence.get_ylim() == token.get_ylim() == pytest.approx((-0.22, 0.22))
    assert sequence.get_yscale() == token.get_yscale() == "symlog"
    assert sequence.get_ylabel() == token.get_ylabel() == "ratio − 1"
