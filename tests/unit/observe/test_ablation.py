"""The report of an ablation, and its rules for collapse, comparison and cost, on synthetic runs."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from gspo_megatron.errors import DataError
from gspo_megatron.observe import ablation
from gspo_megatron.observe.ablation import VariantRuns, findings, is_finished
from gspo_megatron.observe.intervals import share_interval
from gspo_megatron.observe.metrics_files import MetricsWriter, Run


def run_of(rewards: Sequence[float | None], **others: Sequence[float | None]) -> Run:
    """A run in memory. None stands for a value that was not finite."""
    records = [
        {"step": step, "reward/mean": reward, "loss": 0.0, "grad_norm": 1.0}
        for step, reward in enumerate(rewards, start=1)
    ]
    for key, values in others.items():
        for record, value in zip(records, values, strict=True):
            record[key] = value
    return Run(Path("run"), "run", "run", tuple(records))


def with_accuracies(name: str, values: Sequence[float | None]) -> VariantRuns:
    """One run for each seed from 1 on. None means that the seed has no run."""
    runs = {
        seed: run_of([0.5] * 2, **{"evaluation/accuracy": [0.1, value]})
        for seed, value in enumerate(values, start=1)
        if value is not None
    }
    return VariantRuns(name, [], 2, {}, runs)


def write_run(
    folder: Path, steps: int, accuracy: float, seconds: float = 1.0, **more: float
) -> Path:
    with MetricsWriter(folder) as metrics:
        metrics.write({"phase": "rl", "step": 0, "evaluation/accuracy": 0.25})
        for step in range(1, steps + 1):
            record = {
                "phase": "rl",
                "step": step,
                "reward/mean": 0.5,
                "loss": 0.0,
                "grad_norm": 1.0,
                "clip/token/binding": 0.1,
                "mismatch/abs_mean": 0.01,
                "routing/volatility": 0.04,
                "perf/step_seconds": seconds,
                "perf/peak_memory_bytes": 2**30,
                **more,
            }
            if step == steps:
                record["evaluation/accuracy"] = accuracy
            metrics.write(record)
    return folder


def written(folder: Path, name: str, accuracies: Sequence[float], **more: float) -> VariantRuns:
    """Write a variant's runs, one for each seed from 1 on."""
    baseline, _, replay = name.partition("+")
    folders = {
        seed: write_run(folder / name / f"seed_{seed}", 20, accuracy, **more)
        for seed, accuracy in enumerate(accuracies, start=1)
    }
    settings = [f"objective.name={baseline}", f"routing.replay={replay or 'off'}"]
    return VariantRuns(name, settings, 20, folders)


def report_of(variants: Sequence[VariantRuns], out: Path) -> tuple[str, list[str]]:
    """The page of the report, and its findings."""
    path, found = ablation.write_ablation_report(variants, out)
    assert path == out / "report.html"
    return path.read_text(), found


def rows(page: str, heading: str) -> list[list[str]]:
    """The cells of the table below a heading, with the head first."""
    section = re.split(r"<h2[ >]", page.split(f"{heading}</h2>")[1])[0]
    cells = re.findall(r"<tr.*?</tr>", section, re.DOTALL)
    found = [re.findall(r"<t[hd].*?>(.*?)</t[hd]>", row, re.DOTALL) for row in cells]
    return [[html.unescape(cell).strip() for cell in row] for row in found]


# --- collapse -------------------------------------------------------------------------------------

RISING = [0.2 + 0.01 * n for n in range(50)]


@pytest.mark.parametrize(
    ("rewards", "collapsed"),
    [
        (RISING, False),
        ([0.5] * 50, False),
        (RISING[:40] + [0.1] * 10, True),  # fell and did not recover
        (RISING[:20] + [0.1] * 10 + RISING[20:40], False),  # fell and recovered
        (RISING[:48] + [0.0] * 2, False),  # two bad steps are less than a window
        (RISING[:45] + [0.0] * 5, True),
        ([0.6] * 45 + [0.31] * 5, False),  # just above half
        ([0.6] * 45 + [0.29] * 5, True),
        ([-0.5] * 40 + [-2.0] * 10, False),  # negative rewards have no half to fall below
        ([0.0] * 50, False),
        ([0.9] * 5 + [0.1] * 4, False),  # shorter than two windows
        ([0.9] * 5 + [0.1] * 5, True),
        # the last window has 20 of 200 steps, and only half of them are bad
        ([0.8] * 190 + [0.1] * 10, False),
        ([0.8] * 180 + [0.1] * 20, True),
        ([], False),
    ],
)
def test_the_collapse_rule(rewards: list[float], collapsed: bool) -> None:
    assert (ablation.collapse(run_of(rewards)) is not None) == collapsed


@pytest.mark.parametrize("key", ["reward/mean", "loss", "grad_norm"])
def test_a_value_that_is_not_finite_is_a_collapse(key: str) -> None:
    run = run_of([0.5] * 8, **{key: [0.5, 0.5, None, 0.5, 0.5, 0.5, 0.5, 0.5]})
    assert ablation.collapse(run) == f"{key} is not finite at step 3"


def test_collapsed_runs_are_named() -> None:
    fallen = VariantRuns("grpo", [], 2, {}, runs={2: run_of([0.8] * 40 + [0.1] * 10)})
    said = " ".join(findings([fallen]))
    told = "grpo, seed 2 (reward 0.100 at the end, 0.800 at its best)"
    assert f"Collapsed, 1 of 1 runs: {told}" in said


# --- finished runs --------------------------------------------------------------------------------


def test_only_runs_that_reached_their_last_step_count(tmp_path: Path) -> None:
    whole = written(tmp_path, "gspo", [0.5, 0.6])
    folders = {**whole.folders, 3: tmp_path / "absent", 4: write_run(tmp_path / "cut", 7, 0.9)}
    variant = VariantRuns("gspo", [], 20, folders)
    variant.load()
    assert sorted(variant.runs) == [1, 2]
    assert variant.unfinished == {3: "no run", 4: "ends at step 7 of 20"}
    [first, *_] = findings([variant])
    assert "gspo, seed 3 (no run); gspo, seed 4 (ends at step 7 of 20)" in first


def test_a_half_written_last_step_is_not_the_last_step(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", 4, 0.5)
    assert is_finished(folder, 4)
    path = folder / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-30])
    assert not is_finished(folder, 4)
    path.write_bytes(b"damaged\n" + path.read_bytes())
    assert not is_finished(folder, 3)
    assert not is_finished(tmp_path / "absent", 1)
    with pytest.raises(DataError, match=r"metrics.jsonl:1"):
        VariantRuns("a", [], 3, {1: folder}).load()


def test_another_phase_of_as_many_steps_is_no_finished_run(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as metrics:
        for step in range(1, 6):
            metrics.write({"phase": "sft", "step": step, "loss": 1.0})
    assert not is_finished(tmp_path, 5)


# --- comparison -----------------------------------------------------------------------------------


def test_the_interval_is_students_over_paired_seeds() -> None:
    """The differences are 0.1, 0.2 and 0.3. Their mean is 0.2 and their deviation 0.1. Student's t
    is 4.303 for 2 degrees of freedom."""
    one, other = with_accuracies("a", [0.5, 0.7, 0.4]), with_accuracies("b", [0.4, 0.5, 0.1])
    found = ablation.difference(one, other, ablation._ACCURACY)
    assert found is not None and found.seeds == 3
    assert found.mean == pytest.approx(0.2)
    assert found.half_width == pytest.approx(4.303 * 0.1 / math.sqrt(3), rel=1e-4)
    assert not found.significant  # 0.2 is smaller than 0.248


def test_seeds_that_one_variant_lacks_are_left_out() -> None:
    one = with_accuracies("a", [0.5, None, 0.51, 0.5])
    other = with_accuracies("b", [0.4, 0.0, 0.4, 0.4])
    found = ablation.difference(one, other, ablation._ACCURACY)
    assert found is not None and found.seeds == 3
    assert found.mean == pytest.approx(0.31 / 3) and found.significant
    assert ablation.difference(one, with_accuracies("c", []), ablation._ACCURACY) is None


def test_runs_of_another_length_are_named() -> None:
    one = VariantRuns("a", [], 2, {}, {seed: run_of([0.5] * 2) for seed in (1, 2)})
    other = VariantRuns("b", [], 2, {}, {1: run_of([0.5] * 2), 2: run_of([0.5] * 5)})
    told = "Not all runs have 2 steps: b, seed 2 (5). Each is compared at its own end."
    assert findings([one, other])[0] == told
    assert not any("Not all runs" in each for each in findings([one]))


def test_one_seed_shows_no_difference() -> None:
    variants = [with_accuracies("a", [0.9]), with_accuracies("b", [0.1])]
    found = ablation.difference(*variants, ablation._ACCURACY)
    assert found is not None and found.half_width is None and not found.significant
    assert "With one seed nothing can be said about differences." in findings(variants)


def test_every_variant_is_compared_to_the_first_and_replay_to_its_own_baseline() -> None:
    names = ["grpo", "grpo+r2", "gspo", "gspo+r2", "gspo+r3"]
    variants = [with_accuracies(name, [0.5]) for name in names]
    assert [(one.name, other.name) for one, other in ablation.pairs(variants)] == [
        ("grpo+r2", "grpo"),
        ("gspo", "grpo"),
        ("gspo+r2", "grpo"),
        ("gspo+r3", "grpo"),
        ("gspo+r2", "gspo"),
        ("gspo+r3", "gspo"),
    ]


def test_it_is_said_once_when_nothing_differs(tmp_path: Path) -> None:
    variants = [
        written(tmp_path, "grpo", [0.5, 0.6, 0.55]),
        written(tmp_path, "gspo", [0.56, 0.52, 0.6]),
    ]
    page, found = report_of(variants, tmp_path)
    assert "Held-out accuracy is the share of held-out responses with reward ≥ 1." in page
    assert found == [
        "With 3 seeds no difference in held-out accuracy at the end, log-prob mismatch is larger "
        "than its spread over the seeds. This does not show that the variants are equal.",
        "None of the 6 runs collapsed by the rule below.",
    ]


def test_it_is_said_what_differs() -> None:
    variants = [
        with_accuracies("grpo", [0.50, 0.60, 0.55]),
        with_accuracies("gspo", [0.70, 0.81, 0.75]),
        with_accuracies("cispo", [0.40, 0.70, 0.55]),
    ]
    said = " ".join(findings(variants))
    told = "held-out accuracy at the end: gspo − grpo = 20.3 ± 1.4 points, significant."
    assert f"Differences in {told}" in said
    assert "cispo" not in said and "no difference" not in said


def with_metrics(name: str, key: str, values: Sequence[float], **more: float) -> VariantRuns:
    """One run for each seed from 1 on, with one of `values`. The metric has this value at both
    steps of the run."""
    others = {name: [value] * 2 for name, value in more.items()}
    runs = {
        seed: run_of([0.5] * 2, **{key: [value] * 2}, **others)
        for seed, value in enumerate(values, start=1)
    }
    return VariantRuns(name, [], 2, {}, runs)


def test_two_seeds_are_not_tested_however_alike_they_are() -> None:
    key = "mismatch/abs_mean"
    variants = [with_metrics("a", key, [0.5, 0.5]), with_metrics("b", key, [0.9001, 0.9])]
    found = ablation.difference(variants[1], variants[0], ablation._MISMATCH)
    assert found is not None and found.half_width is not None and not found.significant
    assert found.mean > 100 * found.half_width
    said = findings(variants)
    assert "With 2 seeds no difference is tested; that takes 3 at least." in said
    assert "ignificant" not in " ".join(said)


def test_differences_that_are_the_same_for_all_seeds_show_nothing() -> None:
    """For every seed, one more of 8 prompts is right. The interval would have a width of 0, so it
    says nothing."""
    one, other = with_accuracies("a", [0.5] * 3), with_accuracies("b", [0.375] * 3)
    found = ablation.difference(one, other, ablation._ACCURACY)
    assert found is not None and found.half_width == 0 and not found.significant
    assert found.text(ablation._ACCURACY) == "12.5 points, the same for all seeds"
    # One more of 30 prompts: the differences differ by rounding.
    one = with_accuracies("a", [29 / 30, 27 / 30, 26 / 30])
    other = with_accuracies("b", [28 / 30, 26 / 30, 25 / 30])
    found = ablation.difference(one, other, ablation._ACCURACY)
    assert found is not None and found.half_width == 0 and not found.significant


@pytest.mark.parametrize(("prompts", "is_tested"), [(29, False), (30, True)])
def test_an_accuracy_needs_prompts_and_has_an_interval_over_them(
    tmp_path: Path, prompts: int, is_tested: bool
) -> None:
    more = {"evaluation/prompts": float(prompts)}
    variants = [
        written(tmp_path, "grpo", [0.5, 0.6, 0.55], **more),
        written(tmp_path, "gspo", [0.7, 0.81, 0.75], **more),
    ]
    text, found = report_of(variants, tmp_path)
    assert ("Differences in held-out accuracy" in text) is is_tested
    few = "With fewer than 30 held-out prompts accuracies are not tested."
    assert (few in found) is not is_tested
    head, grpo, _ = rows(text, "Outcome")
    low, high = share_interval(0.55, prompts)
    interval = grpo[head.index("95% interval of the accuracy at the end")]
    assert interval == f"{100 * low:.1f}% to {100 * high:.1f}%, n = {prompts}"
    assert "all seeds answer the same prompts" in text


def test_values_that_are_not_finite_are_shown_and_break_nothing(tmp_path: Path) -> None:
    broken = VariantRuns("a", [], 2, {})
    for seed, reward, accuracy in ((1, None, None), (2, 0.5, 0.4)):
        accuracies = {"evaluation/accuracy": [0.2, 0.2, 0.2, accuracy]}
        broken.runs[seed] = run_of([0.5, 0.5, 0.5, reward], **accuracies)
    said = " ".join(findings([broken, with_accuracies("b", [0.5, 0.6])]))
    assert "a, seed 1 (reward/mean is not finite at step 4)" in said
    nothing = dict.fromkeys(("reward/mean", "grad_norm", "routing/volatility"), math.nan)
    variants = [
        written(tmp_path, "grpo", [math.nan, 0.5], **nothing),
        written(tmp_path, "gspo", [0.5, 0.6]),
    ]
    head, grpo, _ = rows(report_of(variants, tmp_path)[0], "Outcome")
    assert grpo[head.index("held-out accuracy at the end")] == "not finite"
    assert grpo[-1] == "2 of 2"


# --- the report -----------------------------------------------------------------------------------


def test_the_page_has_findings_picture_rules_and_tables_with_means_and_spreads(
    tmp_path: Path,
) -> None:
    variants = [
        written(tmp_path, "grpo", [0.5, 0.6, 0.55]),
        written(tmp_path, "gspo", [0.7, 0.8, 0.76]),
        written(tmp_path, "gspo+r3", [0.6, 0.9, 0.75], seconds=1.1, **{"replay/bytes": 1000.0}),
    ]
    text, found = report_of(variants, tmp_path)
    assert [path.name for path in (tmp_path / "plots").iterdir()] == ["variants.png"]
    assert text.count("data:image/png;base64,") == 1
    rules = ("has collapsed when", "significant when", "no correction for the number")
    for part in (*found, *rules, "objective.name=gspo routing.replay=r3"):
        assert part in text
    head, grpo, gspo, _ = rows(text, "Outcome")
    column = head.index("held-out accuracy at the end")
    assert (grpo[0], grpo[column]) == ("grpo", "55.0% ± 5.0%")
    assert gspo[column] == "75.3% ± 5.0%"
    assert grpo[-1] == "0 of 3"
    differences = {row[0]: row for row in rows(text, "Differences")[1:]}
    assert differences["gspo − grpo"][1:] == [
        "3",
        "20.3 ± 1.4 points, significant",
        "0, the same for all seeds",
    ]
    assert differences["gspo+r3 − gspo"][2] == "-0.3 ± 24.9 points"
    head, grpo, _, replayed = rows(text, "Metrics")
    assert grpo[head.index("median step")] == "1.00 s ± 0.00 s"
    assert replayed[head.index("median step")] == "1.10 s ± 0.00 s"
    assert grpo[head.index("volatility")] == "4.0% ± 0.0%"


def test_a_metric_that_only_some_seeds_have_is_not_averaged(tmp_path: Path) -> None:
    variants = [written(tmp_path, name, [0.5, 0.6], **{"replay/bytes": 1e3}) for name in ("a", "b")]
    write_run(tmp_path / "b" / "seed_3", 20, 0.7)  # for example by an earlier version
    folders = {**variants[1].folders, 3: tmp_path / "b" / "seed_3"}
    variants[1] = VariantRuns("b", [], 20, folders)
    head, one, other = rows(report_of(variants, tmp_path)[0], "Metrics")
    column = head.index("routes of a step, bytes")
    assert (one[column], other[column]) == ("1,000 ± 0", "not in all runs")


def test_warnings_name_variant_and_seed(tmp_path: Path) -> None:
    variants = [written(tmp_path, name, [0.5, 0.6]) for name in ("grpo", "gspo")]
    with MetricsWriter(variants[1].folders[2]) as metrics:
        metrics.write({"step": 15, "grad_norm": 50.0})
    [row] = rows(report_of(variants, tmp_path)[0], "Warnings")[1:]
    assert row[:3] == ["gspo/2", "grad_norm", "step 15"]


def test_variants_without_a_finished_run_are_named_and_left_out(tmp_path: Path) -> None:
    whole = written(tmp_path, "gspo", [0.5, 0.6])
    folders = {1: write_run(tmp_path / "cut", 3, 0.5), 2: tmp_path / "absent"}
    text, _ = report_of([VariantRuns("grpo", [], 20, folders), whole], tmp_path)
    assert [row[0] for row in rows(text, "Outcome")[1:]] == ["gspo"]
    [settings] = [r for r in rows(text, "Rules and settings") if r[0] == "grpo"]
    assert settings[2] == "seed 1: ends at step 3 of 20, left out; seed 2: no run, left out"


def test_no_finished_run_at_all_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no run of any variant"):
        report_of([VariantRuns("gspo", [], 20, {1: tmp_path / "absent"})], tmp_path)


def test_names_are_shown_and_never_interpreted(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", 20, 0.5)
    page, _ = report_of([VariantRuns("a", ["objective.options=<b>"], 20, {1: folder})], tmp_path)
    assert "&lt;b&gt;" in page and not re.search(r"<b>(?!\d)", page)
