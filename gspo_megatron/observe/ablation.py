"""The report of an ablation: variants of one configuration, each run with several seeds.

Writes report.html and plots/variants.png; reads only the runs' metrics.jsonl. The report states its
rules: when a run counts as collapsed, and when a difference counts as significant.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from gspo_megatron.errors import DataError
from gspo_megatron.files import write_atomically
from gspo_megatron.observe.intervals import share_interval
from gspo_megatron.observe.metrics_files import METRICS_FILE, Run, read_metrics, steps_done
from gspo_megatron.observe.plots import ABLATION, plot_comparison
from gspo_megatron.observe.progress import MISSING, duration, fixed, number, percent, points
from gspo_megatron.observe.report import (
    Picture,
    ReportSection,
    Table,
    correct_at,
    mean_and_spread,
    render_html,
    warning_section,
)
from gspo_megatron.observe.windows import SMALLEST_WINDOW, window, window_means

COLLAPSED_BELOW = 0.5  # times the mean reward of the best window
LEAST_SEEDS = 3  # with fewer seeds no difference counts as significant
LEAST_PROMPTS = 30  # held-out prompts; with fewer no accuracy difference counts as significant

_COLLAPSE_RULE = (
    "A run has collapsed when a reward, loss or gradient norm of its RL steps is not finite, or "
    "when the mean reward of its last window of steps is below half of the best mean reward of "
    f"any window. A window is a tenth of the steps, at least {SMALLEST_WINDOW}. In a run of fewer "
    "than two windows, or whose best window is not above 0, only values that are not finite count."
)
_SIGNIFICANCE_RULE = (
    "Two variants are compared seed by seed: runs of one seed start from the same weights and draw "
    "the same prompts. A cell is the mean difference ± half of its 95% interval (Student's t over "
    "the seeds that both have); the difference is significant when this interval does not include "
    f"0, with at least {LEAST_SEEDS} seeds, and for the accuracy at least {LEAST_PROMPTS} held-out "
    "prompts. Differences that are the same for all seeds have no interval, and are never "
    "significant. There is no correction for the number of comparisons: of twenty without any true "
    "difference, one is significant on average."
)
_ACCURACY_RULE = (
    "Held-out accuracy is the share of held-out responses with {}. Its 95% interval (Wilson's "
    "score interval) is that of the mean over seeds, over n held-out prompts: all seeds answer the "
    "same prompts, so further seeds do not make it narrower."
)


@dataclass(frozen=True)
class VariantRuns:
    """One variant of the configuration, with its runs."""

    name: str
    overrides: Sequence[str]  # changes of the configuration
    steps: int  # number of RL steps in a finished run
    folders: Mapping[int, Path]  # run folder by seed
    runs: dict[int, Run] = field(default_factory=dict)  # finished runs by seed
    unfinished: dict[int, str] = field(default_factory=dict)  # seed -> text: how far the run got

    def load(self) -> None:
        """Read the finished runs. Unfinished runs are left out, because they are shorter.

        Raises DataError for a damaged file.
        """
        for seed, folder in self.folders.items():
            if not (folder / METRICS_FILE).is_file():
                self.unfinished[seed] = "no run"
                continue
            run = Run(folder, f"{self.name}/{seed}", self.name, tuple(read_metrics(folder)))
            done = steps_done(run.records)
            if done < self.steps:
                self.unfinished[seed] = f"ends at step {done} of {self.steps}"
            else:
                self.runs[seed] = run

    def prompts(self) -> int | None:
        """Return the smallest number of held-out prompts of any run, or None if a run has none."""
        counts = [run.series("evaluation/prompts")[1] for run in self.runs.values()]
        last = [int(values[-1]) for values in counts if values and math.isfinite(values[-1])]
        return min(last) if last and len(last) == len(counts) else None


def is_finished(folder: Path, steps: int) -> bool:
    """Whether a run folder holds a run that reached its last step."""
    try:
        return steps_done(read_metrics(folder)) >= steps
    except DataError:  # no metrics, or damaged ones
        return False


class Measure(NamedTuple):
    """One number of each run: a metric reduced over the steps."""

    name: str
    key: str
    reduce: Callable[[Sequence[float]], float]  # takes at least one value
    write: Callable[[float | None], str]

    def of(self, variant: VariantRuns) -> dict[int, float]:
        """Return the variant's values by seed; runs without the metric are left out."""
        series = {seed: run.series(self.key)[1] for seed, run in variant.runs.items()}
        return {seed: self.reduce(values) for seed, values in series.items() if values}


def _of_finite(reduce: Callable[[list[float]], float]) -> Callable[[Sequence[float]], float]:
    def reduce_finite(values: Sequence[float]) -> float:
        finite = [value for value in values if math.isfinite(value)]
        return reduce(finite) if finite else math.nan

    return reduce_finite


def _running_means(values: Sequence[float]) -> list[float]:
    """Return the means of all windows in order. A run shorter than a window gives one mean."""
    return window_means(values, min(window(len(values)), len(values)))


def _last_window(values: Sequence[float]) -> float:
    return _running_means(values)[-1]


_mean, _median, _largest = map(_of_finite, (statistics.fmean, statistics.median, max))
_ACCURACY = Measure("held-out accuracy at the end", "evaluation/accuracy", itemgetter(-1), percent)
_REWARD = Measure("reward at the end", "reward/mean", _last_window, fixed)
_MISMATCH = Measure("log-prob mismatch", "mismatch/abs_mean", _mean, number)
_ROUNDING = 1e-9  # differences that differ by this share are equal
_OUTCOME = (
    Measure("held-out accuracy at the start", "evaluation/accuracy", itemgetter(0), percent),
    _ACCURACY,
    _REWARD,
)
_UPDATES = (
    Measure("tokens clipped", "clip/token/binding", _mean, percent),
    *(
        Measure(f"{unit} ratio {name}", f"ratio/{unit}/{name}", _mean, fixed)
        for unit in ("token", "sequence")
        for name in ("p01", "p99")
    ),
    Measure("largest token ratio", "ratio/token/max", _largest, number),
    _MISMATCH,
    Measure("volatility", "routing/volatility", _mean, percent),
    Measure("gradient norm, largest", "grad_norm", _largest, number),
    Measure("median step", "perf/step_seconds", _median, duration),
    Measure("peak memory, bytes", "perf/peak_memory_bytes", _largest, number),
    Measure("routes of a step, bytes", "replay/bytes", _mean, number),
)


def collapse(run: Run) -> str | None:
    """Return why a run counts as collapsed by the rule in the report, or None if it does not."""
    for key in ("reward/mean", "loss", "grad_norm"):
        for step, value in zip(*run.series(key), strict=True):
            if not math.isfinite(value) and step > 0:
                return f"{key} is not finite at step {step}"
    rewards = run.series("reward/mean")[1]
    if len(rewards) < 2 * window(len(rewards)):
        return None
    means = _running_means(rewards)
    best = max(means)
    if best > 0 and means[-1] < COLLAPSED_BELOW * best:
        return f"reward {means[-1]:.3f} at the end, {best:.3f} at its best"
    return None


# --- comparisons ----------------------------------------------------------------------------------


class Difference(NamedTuple):
    """One variant's measure minus another variant's."""

    mean: float
    half_width: float | None  # half of the 95% interval; None with one seed
    seeds: int
    significant: bool  # by the rule in the report

    def text(self, measure: Measure) -> str:
        write, unit = (points, " points") if measure is _ACCURACY else (measure.write, "")
        if self.half_width == 0:
            return f"{write(self.mean)}{unit}, the same for all seeds"
        width = "" if self.half_width is None else f" ± {write(self.half_width)}"
        return f"{write(self.mean)}{width}{unit}" + ", significant" * self.significant


def difference(variant: VariantRuns, other: VariantRuns, measure: Measure) -> Difference | None:
    """Compare two variants over their common seeds.

    Returns None if they have no common seed, or if a value is not finite.
    """
    from scipy import stats  # slow to import; only this report needs it

    ours, theirs = measure.of(variant), measure.of(other)
    differences = [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs)]
    if not differences or not all(map(math.isfinite, differences)):
        return None
    mean, count, half_width = statistics.fmean(differences), len(differences), None
    if max(differences) - min(differences) <= _ROUNDING * max(map(abs, differences)):
        half_width = 0.0 if count > 1 else None  # the same for all seeds
    elif count > 1:
        half_width = float(stats.sem(differences) * stats.t.ppf(0.975, count - 1))
    is_tested = count >= LEAST_SEEDS and (measure is not _ACCURACY or _enough(variant, other))
    return Difference(
        mean, half_width, count, bool(is_tested and half_width and abs(mean) > half_width)
    )


def _enough(*variants: VariantRuns) -> bool:
    """Whether the variants have enough held-out prompts to test accuracies."""
    counts = [count for variant in variants if (count := variant.prompts()) is not None]
    return min(counts, default=LEAST_PROMPTS) >= LEAST_PROMPTS


def pairs(variants: Sequence[VariantRuns]) -> list[tuple[VariantRuns, VariantRuns]]:
    """Return the pairs to compare: every variant with the first one, and NAME+REPLAY with NAME."""
    first, by_name = variants[0], {variant.name: variant for variant in variants}
    compared = [(variant, first) for variant in variants[1:]]
    for variant in variants:
        name, plus, _ = variant.name.rpartition("+")
        if plus and by_name.get(name, first) is not first:
            compared.append((variant, by_name[name]))
    return compared


def _compared(variants: Sequence[VariantRuns]) -> list[Measure]:
    """Return the measures to compare: the outcome and the mismatch, if the runs have them."""
    outcome = _ACCURACY if any(map(_ACCURACY.of, variants)) else _REWARD
    return [measure for measure in (outcome, _MISMATCH) if any(map(measure.of, variants))]


# --- the report -----------------------------------------------------------------------------------


def write_ablation_report(variants: Sequence[VariantRuns], out: Path) -> tuple[Path, list[str]]:
    """Write OUT/report.html and OUT/plots. Returns the report's path and the findings.

    Raises DataError if no run is finished or a metrics file is damaged.
    """
    for variant in variants:
        variant.load()
    present = [variant for variant in variants if variant.runs]
    runs = [run for variant in present for run in variant.runs.values()]
    if not runs:
        raise DataError(f"{out}: no run of any variant is finished; there is nothing to report")
    picture = plot_comparison(runs, out / "plots" / "variants.png", ABLATION)
    sentences = findings(variants)
    least = correct_at([run.path for run in runs])
    accuracy_rule = [_ACCURACY_RULE.format(least)] if any(map(_ACCURACY.of, present)) else []
    sections = [
        ReportSection("Findings", [*sentences]),
        *warning_section(runs),
        ReportSection("Outcome", [*accuracy_rule, _outcome_table(present)]),
        ReportSection("Differences", [_SIGNIFICANCE_RULE, _difference_table(present)]),
        *([ReportSection("Plots", [Picture(picture, picture.stem)])] if picture else []),
        ReportSection("Metrics", [_table(present, _UPDATES)]),
        ReportSection("Rules and settings", [_COLLAPSE_RULE, _settings_table(variants)]),
    ]
    title = f"Ablation: {len(variants)} variants, {len(runs)} runs"
    page = render_html(title, str(out), sections).encode("utf-8", errors="replace")
    return write_atomically(out / "report.html", page), sentences


def findings(variants: Sequence[VariantRuns]) -> list[str]:
    """Return the main results as sentences. They follow from the metrics and the stated rules."""
    sentences = []
    left_out = [
        f"{v.name}, seed {seed} ({why})" for v in variants for seed, why in v.unfinished.items()
    ]
    if left_out:
        sentences.append(f"Left out, because not finished: {'; '.join(left_out)}.")
    present = [variant for variant in variants if variant.runs]
    sentences += _sentences_on_lengths(present)
    if len(present) > 1:
        sentences += _sentences_on_differences(present)
    collapses = [
        f"{v.name}, seed {seed} ({why})"
        for v in present
        for seed, run in v.runs.items()
        if (why := collapse(run))
    ]
    total = sum(len(variant.runs) for variant in present)
    if collapses:
        sentences.append(f"Collapsed, {len(collapses)} of {total} runs: {'; '.join(collapses)}.")
    else:
        sentences.append(f"None of the {total} runs collapsed by the rule below.")
    return sentences


def _sentences_on_lengths(variants: Sequence[VariantRuns]) -> list[str]:
    """Return a sentence about the runs that are longer or shorter than most others, if there are
    any. An ablation itself makes runs of one length, but a variant may have its own number of
    steps, and a report may be asked for with fewer steps than the runs have."""
    lengths = {
        f"{variant.name}, seed {seed}": steps_done(run.records)
        for variant in variants
        for seed, run in variant.runs.items()
    }
    usual = statistics.mode(lengths.values()) if lengths else 0
    others = [f"{name} ({steps})" for name, steps in lengths.items() if steps != usual]
    if not others:
        return []
    text = f"Not all runs have {usual} steps: {'; '.join(others)}."
    return [f"{text} Each is compared at its own end."]


def _sentences_on_differences(variants: Sequence[VariantRuns]) -> list[str]:
    """Return sentences about the significant, the insignificant and the untested differences."""
    sentences, undecided, seeds = [], [], 0
    for measure in _compared(variants):
        differences = [
            (one, other, difference(one, other, measure)) for one, other in pairs(variants)
        ]
        seeds = max([seeds, *(each.seeds for *_, each in differences if each)])
        significant = [
            f"{one.name} − {other.name} = {each.text(measure)}"
            for one, other, each in differences
            if each and each.significant
        ]
        if significant:
            sentences.append(f"Differences in {measure.name}: {'; '.join(significant)}.")
        elif measure is _ACCURACY and not _enough(*variants):
            few = f"With fewer than {LEAST_PROMPTS} held-out prompts accuracies are not tested."
            sentences.append(few)
        else:
            undecided.append(measure.name)
    if seeds < 2:
        return ["With one seed nothing can be said about differences."]
    if seeds < LEAST_SEEDS:
        return [f"With {seeds} seeds no difference is tested; that takes {LEAST_SEEDS} at least."]
    if undecided:
        sentences.append(
            f"With {seeds} seeds no difference in {', '.join(undecided)} is larger than its spread "
            "over the seeds. This does not show that the variants are equal."
        )
    return sentences


def _table(variants: Sequence[VariantRuns], measures: Sequence[Measure]) -> Table:
    """Return a table with a row for each variant; measures that no run has are left out."""
    shown = [measure for measure in measures if any(map(measure.of, variants))]
    rows = []
    for variant in variants:
        columns = ((measure, measure.of(variant)) for measure in shown)
        cells = (mean_and_spread([*map(of.get, variant.runs)], m.write) for m, of in columns)
        rows.append([variant.name, *cells])
    return Table(["variant", *(measure.name for measure in shown)], rows)


def _outcome_table(variants: Sequence[VariantRuns]) -> Table:
    table = _table(variants, _OUTCOME)
    rows = []
    for row, variant in zip(table.rows, variants, strict=True):
        accuracies, count = list(_ACCURACY.of(variant).values()), variant.prompts()
        interval = MISSING
        if count is not None and accuracies and all(map(math.isfinite, accuracies)):
            low, high = share_interval(statistics.fmean(accuracies), count)
            interval = f"{percent(low)} to {percent(high)}, n = {count}"
        collapsed = sum(collapse(run) is not None for run in variant.runs.values())
        rows.append([*row, interval, f"{collapsed} of {len(variant.runs)}"])
    return Table([*table.head, "95% interval of the accuracy at the end", "collapsed"], rows)


def _difference_table(variants: Sequence[VariantRuns]) -> Table:
    measures, rows = _compared(variants), []
    for one, other in pairs(variants):
        differences = [difference(one, other, measure) for measure in measures]
        if any(differences):
            seeds = max(each.seeds for each in differences if each)
            cells = [
                each.text(measure) if each else MISSING
                for each, measure in zip(differences, measures, strict=True)
            ]
            rows.append([f"{one.name} − {other.name}", str(seeds), *cells])
    return Table(["difference of", "seeds", *(measure.name for measure in measures)], rows)


def _settings_table(variants: Sequence[VariantRuns]) -> Table:
    rows = []
    for variant in variants:
        runs = [f"seed {seed}" for seed in variant.runs]
        runs += [f"seed {seed}: {why}, left out" for seed, why in variant.unfinished.items()]
        rows.append([variant.name, " ".join(variant.overrides), "; ".join(runs)])
    return Table(["variant", "settings", "runs"], rows)
