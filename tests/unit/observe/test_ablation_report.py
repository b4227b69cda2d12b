"""The report of an ablation as files: both forms, pictures, and nothing that is not there."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from gspo_megatron.errors import DataError
from gspo_megatron.observe.ablation import Arm, load_arms
from gspo_megatron.observe.ablation_plots import layers_of
from gspo_megatron.observe.ablation_report import WrittenReport, write_ablation_report
from tests.unit.observe.test_ablation import arm, write_run


def make(folder: Path, volatility: bool = True) -> WrittenReport:
    arms = [
        arm(folder, "grpo", [0.5, 0.6, 0.55]),
        arm(folder, "gspo", [0.7, 0.8, 0.76]),
        arm(folder, "gspo+r3", [0.6, 0.9, 0.75], seconds=1.1, **{"replay/bytes": 1000.0}),
    ]
    return write_ablation_report(arms, folder, volatility_switched_on=volatility)


def rows(text: str, heading: str) -> list[list[str]]:
    """The cells of the table below a heading, its head first."""
    section = text.split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_both_forms_are_written_with_the_pictures(tmp_path: Path) -> None:
    written = make(tmp_path)
    assert [path.name for path in written.paths] == ["report.html", "report.md"]
    page, text = (path.read_text() for path in written.paths)
    pictures = sorted(path.name for path in (tmp_path / "plots").iterdir())
    assert pictures == ["arms.png", "volatility.png"]
    assert page.count("data:image/png;base64,") == 2
    for name in pictures:
        assert f"](plots/{name})" in text
    for line in written.findings:
        assert line in text


def test_the_tables_have_means_and_spreads(tmp_path: Path) -> None:
    text = make(tmp_path).paths[1].read_text()
    head, _, grpo, gspo, _ = rows(text, "Outcome")
    column = head.index("held out at the end")
    assert (grpo[0], grpo[column]) == ("grpo", "55.0% ± 5.0%")
    assert gspo[column] == "75.3% ± 5.0%"
    assert grpo[-1] == "0 of 3"
    comparisons = {row[0]: row for row in rows(text, "Comparisons")[2:]}
    assert comparisons["gspo − grpo"] == ["gspo − grpo", "3", "20.3 ± 1.4, apart", "0 ± 0"]
    assert comparisons["gspo+r3 − gspo"][2] == "-0.3 ± 24.9"
    [cost] = rows(text, "Cost of replay")[2:]
    assert cost[0] == "gspo+r3 over gspo"
    assert cost[2:] == ["+10.0%", "+10.0% to +10.0%", "+0.0 MiB", "1,000 B"]
    layers = rows(text, "Volatility by layer")
    assert layers[0] == ["arm", "layer 2", "layer 10"]
    assert layers[2][1:] == ["5.0% ± 0.0%", "3.0% ± 0.0%"]


def test_the_rules_are_stated(tmp_path: Path) -> None:
    text = make(tmp_path).paths[1].read_text()
    for part in ("has collapsed when", "told apart when", "`routing.volatility` was switched on"):
        assert part in text
    assert "objective.name=gspo routing.replay=r3" in text
    without = make(tmp_path, volatility=False).paths[1].read_text()
    assert "was switched on" not in without


def test_layers_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    [loaded] = load_arms([arm(tmp_path, "gspo", [0.5])])
    assert list(layers_of(loaded)) == [2, 10]


def test_arms_without_a_finished_run_are_named_and_left_out(tmp_path: Path) -> None:
    whole = arm(tmp_path, "gspo", [0.5, 0.6])
    cut = Arm("grpo", [], 20, {1: write_run(tmp_path / "cut", 3, 0.5), 2: tmp_path / "absent"})
    text = write_ablation_report([cut, whole], tmp_path, volatility_switched_on=True).paths[1]
    outcome = rows(text.read_text(), "Outcome")
    assert [row[0] for row in outcome[2:]] == ["gspo"]
    [settings] = [r for r in rows(text.read_text(), "Rules and settings") if r[0] == "grpo"]
    assert settings[2] == "seed 1: ends at step 3 of 20, left out; seed 2: no run, left out"


def test_no_finished_run_at_all_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no run of any arm"):
        write_ablation_report(
            [Arm("gspo", [], 20, {1: tmp_path / "absent"})], tmp_path, volatility_switched_on=True
        )


def test_names_are_shown_and_never_interpreted(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", 20, 0.5)
    arms = [Arm("a", ["objective.options=<b>"], 20, {1: folder})]
    page = write_ablation_report(arms, tmp_path, volatility_switched_on=False).paths[0].read_text()
    assert "&lt;b&gt;" in page and not re.search(r"<b>(?!\d)", page)


def test_a_run_that_ended_in_figures_that_are_not_finite(tmp_path: Path) -> None:
    broken = {
        "reward/mean": math.nan,
        "grad_norm": math.nan,
        "routing/layer_02/volatility": math.nan,
    }
    arms = [arm(tmp_path, "grpo", [math.nan, 0.5], **broken), arm(tmp_path, "gspo", [0.5, 0.6])]
    written = write_ablation_report(arms, tmp_path, volatility_switched_on=True)
    head, _, grpo, _ = rows(written.paths[1].read_text(), "Outcome")
    assert grpo[head.index("held out at the end")] == "not finite"
    assert grpo[-1] == "2 of 2"
