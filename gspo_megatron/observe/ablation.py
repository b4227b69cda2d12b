"""The report of an ablation: variants of one configuration, each run with several seeds.

report.html, report.md and plots/*.png, from the runs' metrics.jsonl alone. The report states its
rules: when a run counts as collapsed, and when a difference counts as significant.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gspo_megatron.errors import DataError
from gspo_megatron.observe.metrics_files import METRICS_FILE, Run, read_metrics, steps_done
from gspo_megatron.observe.plots import ABLATION, Page, Panel, plot_comparison
from gspo_megatron.observe.progress import MISSING, duration, fixed, number, percent, points
from gspo_megatron.observe.report import (
    SMALLEST_WINDOW,
    Picture,
    ReportSection,
    Table,
    correct_at,
    mean_and_spread,
    render_html,
    warning_section,
    window,
    window_means,
)
from gspo_megatron.observe.suite_scores import share_interval

COLLAPSED_BELOW = 0.5  # of the best
LEAST_SEEDS = 3  # for a difference to be called significant
LEAST_PROMPTS = 30  # of a held-out accuracy, for the same

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
    "significant. Neither are those of token ratios: their quantiles are read from a histogram, "
    "whose bins are 3.7% of the distance from 1 wide. There is no correction for the number of "
    "comparisons: of twenty without any true difference, one is significant on average."
)
_ACCURACY_RULE = (
    "Its 95% interval (Wilson's score interval) is that of the mean over seeds, over n held-out "
    "prompts: all seeds answer the same prompts, so further seeds do not make it narrower."
)
_LAYER_KEY = re.compile(r"routing/layer_(\d+)/volatility")

Writer = Callable[["float | None"], str]


@dataclass(frozen=True)
class VariantRuns:
    """One variant and where its runs are."""

    name: str
    overrides: Sequence[str]  # what it changes in the configuration
    steps: int  # of RL in a finished run
    folders: Mapping[int, Path]  # by seed
    baseline: str | None = None  # the variant that differs only by having no replay
    runs: dict[int, Run] = field(default_factory=dict)  # the finished ones, by seed
    unfinished: dict[int, str] = field(default_factory=dict)  # by seed: how far it got

    def load(self) -> None:
        """Read the finished runs. A shorter run would make the comparison one of lengths.

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


def is_finished(folder: Path, steps: int) -> bool:
    """Whether a run folder holds a run that reached its last step."""
    try:
        return steps_done(read_metrics(folder)) >= steps
    except DataError:  # no metrics, or damaged ones
        return False


# --- measures of a run ----------------------------------------------------------------------------


class Measure(NamedTuple):
    """One number of each run: a metric reduced over the steps."""

    name: str
    key: str
    # of at least one value; None where they are too few to tell
    reduce: Callable[[Sequence[float]], float | None]
    write: Writer
    write_difference: Writer | None = None  # `write` unless given
    is_binned: bool = False  # a quantile that was read from a histogram

    def of(self, variant: VariantRuns) -> dict[int, float]:
        """The values of the runs that have the metric, by seed."""
        series = {seed: run.series(self.key)[1] for seed, run in variant.runs.items()}
        found = {seed: self.reduce(values) for seed, values in series.items() if values}
        return {seed: value for seed, value in found.items() if value is not None}


def _of_finite(reduce: Callable[[list[float]], float]) -> Callable[[Sequence[float]], float]:
    def reduce_finite(values: Sequence[float]) -> float:
        finite = [value for value in values if math.isfinite(value)]
        return reduce(finite) if finite else math.nan

    return reduce_finite


_mean, _median, _largest = map(_of_finite, (statistics.fmean, statistics.median, max))
_first, _last = itemgetter(0), itemgetter(-1)


def _last_window(values: Sequence[float]) -> float:
    return running_means(values)[-1]


def largest_fall(rewards: Sequence[float]) -> float | None:
    """The largest distance of the windowed mean reward below its best value so far; None for a
    run that is too short to have two windows."""
    means = np.array(running_means(rewards))
    if len(means) < 2:
        return None
    return float(np.max(np.maximum.accumulate(means) - means))


def running_means(values: Sequence[float]) -> list[float]:
    """The means of all windows in order; of a run shorter than one, the mean of all of it."""
    return window_means(values, min(window(len(values)), len(values)))


def collapse(run: Run) -> str | None:
    """Why a run counts as collapsed, by the rule in the report; None: it does not."""
    for key in ("reward/mean", "loss", "grad_norm"):
        for step, value in zip(*run.series(key), strict=True):
            if not math.isfinite(value) and step > 0:
                return f"{key} is not finite at step {step}"
    rewards = run.series("reward/mean")[1]
    if len(rewards) < 2 * window(len(rewards)):
        return None
    means = running_means(rewards)
    best = max(means)
    if best > 0 and means[-1] < COLLAPSED_BELOW * best:
        return f"reward {means[-1]:.3f} at the end, {best:.3f} at its best"
    return None


def held_out_prompts(variant: VariantRuns) -> int | None:
    """How many held-out prompts count in the accuracies of a variant's runs; the least of all. None
    in runs of versions that did not write it down."""
    counts = [run.series("evaluation/prompts")[1] for run in variant.runs.values()]
    last = [int(values[-1]) for values in counts if values and math.isfinite(values[-1])]
    return min(last) if last and len(last) == len(counts) else None


_ACCURACY = Measure("held-out accuracy at the end", "evaluation/accuracy", _last, percent, points)
_REWARD = Measure("reward at the end", "reward/mean", _last_window, fixed)
_RATIOS = tuple(
    Measure(f"{unit} ratio {name}", f"ratio/{unit}/{name}", _mean, fixed, is_binned=unit == "token")
    for unit in ("token", "sequence")
    for name in ("p01", "p99")
)
_MISMATCH = Measure("log-prob mismatch", "mismatch/abs_mean", _mean, number)
_OUTCOME = (
    Measure("held-out accuracy at the start", "evaluation/accuracy", _first, percent),
    _ACCURACY,
    Measure("best held-out accuracy", "evaluation/accuracy", _largest, percent),
    _REWARD,
    Measure("largest fall of reward", "reward/mean", largest_fall, fixed),
)
_UPDATES = (
    Measure("tokens clipped", "clip/token/binding", _mean, percent),
    Measure("sequences clipped", "clip/sequence/binding", _mean, percent),
    *_RATIOS,
    Measure("largest token ratio", "ratio/token/max", _largest, number),
    _MISMATCH,
    Measure("volatility", "routing/volatility", _mean, percent),
    Measure("tokens changed", "routing/tokens_changed", _mean, percent),
    Measure("gradient norm, median", "grad_norm", _median, number),
    Measure("gradient norm, largest", "grad_norm", _largest, number),
    Measure("entropy at the end", "policy/entropy", _last_window, fixed),
)


# --- comparisons ----------------------------------------------------------------------------------


class Difference(NamedTuple):
    """One variant's measure minus another's."""

    mean: float
    half_width: float | None  # of the 95% interval; None with one seed
    seeds: int
    is_tested: bool = True  # whether these numbers can show a difference

    @property
    def significant(self) -> bool:
        """Whether the difference is significant by the rule of the report."""
        if not self.is_tested or self.seeds < LEAST_SEEDS or not self.half_width:
            return False
        return abs(self.mean) > self.half_width


def difference(variant: VariantRuns, other: VariantRuns, measure: Measure) -> Difference | None:
    """Over the seeds that both have; None where they share none, or a value is not finite."""
    from scipy import stats  # slow to import, and needed by this report only

    ours, theirs = measure.of(variant), measure.of(other)
    differences = [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs)]
    count = len(differences)
    if not differences or not all(map(math.isfinite, differences)):
        return None
    half_width = None
    if count > 1:
        half_width = float(stats.t.ppf(0.975, count - 1) * stats.sem(differences))
    is_tested = not measure.is_binned
    if measure is _ACCURACY:
        prompts = [n for n in map(held_out_prompts, (variant, other)) if n is not None]
        is_tested = min(prompts, default=LEAST_PROMPTS) >= LEAST_PROMPTS
    return Difference(statistics.fmean(differences), half_width, count, is_tested)


def pairs(variants: Sequence[VariantRuns]) -> list[tuple[VariantRuns, VariantRuns]]:
    """What is compared: every variant to the first one, and replay to its baseline without it."""
    found = [(variant, variants[0]) for variant in variants[1:]]
    return found + [pair for pair in _replay_pairs(variants) if pair[1] is not variants[0]]


def _replay_pairs(variants: Sequence[VariantRuns]) -> list[tuple[VariantRuns, VariantRuns]]:
    by_name = {variant.name: variant for variant in variants}
    return [(v, by_name[v.baseline]) for v in variants if v.baseline in by_name]


def _compared_measures(variants: Sequence[VariantRuns]) -> list[Measure]:
    """The outcome, then what replay is meant to improve, as far as the runs have it."""
    measures = [_outcome_measure(variants), *_RATIOS[:2], _MISMATCH]
    return [measure for measure in measures if any(map(measure.of, variants))]


def _outcome_measure(variants: Sequence[VariantRuns]) -> Measure:
    return _ACCURACY if any(map(_ACCURACY.of, variants)) else _REWARD


# --- the report -----------------------------------------------------------------------------------


def write_ablation_report(
    variants: Sequence[VariantRuns], out: Path, *, volatility_switched_on: bool
) -> tuple[list[Path], list[str]]:
    """Write OUT/report.html, OUT/report.md and OUT/plots; returns both reports and the findings.

    Raises DataError when no run is finished, or a metrics file is damaged.
    """
    for variant in variants:
        variant.load()
    present = [variant for variant in variants if variant.runs]
    runs = [run for variant in present for run in variant.runs.values()]
    if not runs:
        raise DataError(f"{out}: no run of any variant is finished; there is nothing to report")
    keys = {key for run in runs for record in run.records for key in record}
    found = {int(match[1]): match[0] for match in map(_LAYER_KEY.fullmatch, keys) if match}
    layers = dict(sorted(found.items()))
    volatility_page = Page(
        "volatility",
        "Volatility by layer",
        tuple(Panel(f"Layer {n}", "share changed", (layers[n],), percent=True) for n in layers),
    )
    by_layer = [Measure(f"layer {n}", layers[n], _mean, percent) for n in layers]
    pictures = [
        plot_comparison(runs, out / "plots" / "variants.png", ABLATION),
        plot_comparison(runs, out / "plots" / "volatility.png", volatility_page),
    ]
    sentences = findings(variants)
    sections = [
        ReportSection("Findings", [*sentences]),
        ReportSection("Outcome", [*_accuracy_rule(present), _outcome_table(present)]),
        ReportSection("Differences", [_SIGNIFICANCE_RULE, _difference_table(present)]),
        ReportSection("Plots", [Picture(path, path.stem) for path in pictures if path]),
        ReportSection("Metrics of the updates", [_table(present, _UPDATES)]),
        ReportSection("Volatility by layer", [_table(present, by_layer)]),
        ReportSection("Cost of replay", _cost(present, volatility_switched_on)),
        ReportSection("Rules and settings", _rules(variants, volatility_switched_on)),
    ]
    sections[1:1] = warning_section(runs)
    # Without metrics for it, a section has only its explanation, or a table without cells.
    sections = [section for section in sections if not _is_empty(section)]
    title = f"Ablation: {len(variants)} variants, {len(runs)} runs"
    html, markdown = out / "report.html", out / "report.md"
    html.write_text(render_html(title, str(out), sections), encoding="utf-8")
    text = "\n\n".join([f"# {title}", *(_as_markdown(section, out) for section in sections)])
    markdown.write_text(text + "\n", encoding="utf-8")
    return [html, markdown], sentences


def _accuracy_rule(variants: Sequence[VariantRuns]) -> list[str]:
    if not any(map(_ACCURACY.of, variants)):
        return []
    least = correct_at([run.path for variant in variants for run in variant.runs.values()])
    rule = f"Held-out accuracy is the share of held-out responses with {least}."
    has_interval = any(map(held_out_prompts, variants))
    return [f"{rule} {_ACCURACY_RULE}" if has_interval else rule]


def findings(variants: Sequence[VariantRuns]) -> list[str]:
    """The main results as sentences: only what the metrics show by the stated rules."""
    found = []
    left_out = [
        f"{v.name}, seed {seed} ({why})" for v in variants for seed, why in v.unfinished.items()
    ]
    if left_out:
        found.append(f"Left out, because not finished: {'; '.join(left_out)}.")
    present = [variant for variant in variants if variant.runs]
    outcome = _outcome_measure(present)
    values = {v.name: list(outcome.of(v).values()) for v in present}
    means = {name: statistics.fmean(v) for name, v in values.items() if v}
    means = {name: mean for name, mean in means.items() if math.isfinite(mean)}
    if means:
        worst, best = min(means, key=means.__getitem__), max(means, key=means.__getitem__)
        low, high = outcome.write(means[worst]), outcome.write(means[best])
        span = f"{low} ({worst}) to {high} ({best})" if low != high else low
        prompts = [held_out_prompts(v) for v in present] if outcome is _ACCURACY else []
        of = f" (n = {min(filter(None, prompts))} held-out prompts)" if any(prompts) else ""
        found.append(f"{outcome.name.capitalize()}, mean over seeds: {span}{of}.")
    found += _significant_differences(present)
    collapses = [
        f"{v.name}, seed {seed} ({why})"
        for v in present
        for seed, run in v.runs.items()
        if (why := collapse(run))
    ]
    total = sum(len(variant.runs) for variant in present)
    if collapses:
        found.append(f"Collapsed, {len(collapses)} of {total} runs: {'; '.join(collapses)}.")
    else:
        found.append(f"None of the {total} runs collapsed{_too_short(present)}.")
    return found


def _too_short(variants: Sequence[VariantRuns]) -> str:
    """What has to be said where no reward can tell a collapse."""
    lengths = [len(run.series("reward/mean")[1]) for v in variants for run in v.runs.values()]
    if any(steps >= 2 * window(steps) for steps in lengths):
        return ""
    least = 2 * SMALLEST_WINDOW
    return f"; in runs of fewer than {least} steps only values that are not finite would show it"


def _significant_differences(variants: Sequence[VariantRuns]) -> list[str]:
    significant, others, seeds = [], [], 0
    for measure in _compared_measures(variants):
        if measure.is_binned:
            continue
        texts = []
        for one, other in pairs(variants):
            found = difference(one, other, measure)
            if found is not None and found.half_width is not None:
                seeds = max(seeds, found.seeds)
            if found is not None and found.significant:
                side = "above" if found.mean > 0 else "below"
                size = _interval(found._replace(mean=abs(found.mean)), measure)
                texts.append(f"{one.name} is {side} {other.name} by {size}")
        if measure is _ACCURACY and not _enough_prompts(variants):
            continue
        if texts:
            significant.append(f"Significant differences in {measure.name}: {'; '.join(texts)}.")
        else:
            others.append(measure.name)
    if len(variants) < 2:
        return []
    if not seeds:
        return ["With one seed nothing can be said about differences."]
    if seeds < LEAST_SEEDS:
        return [f"With {seeds} seeds no difference is tested; that takes {LEAST_SEEDS} at least."]
    if not _enough_prompts(variants):
        few = f"With fewer than {LEAST_PROMPTS} held-out prompts accuracies are not tested."
        significant.append(few)
    if others:
        significant.append(
            f"With {seeds} seeds no difference in {', '.join(others)} is larger than its spread "
            "over the seeds. This does not show that the variants are equal."
        )
    return significant


def _enough_prompts(variants: Sequence[VariantRuns]) -> bool:
    counts = [n for n in map(held_out_prompts, variants) if n is not None]
    return min(counts, default=LEAST_PROMPTS) >= LEAST_PROMPTS


def _interval(found: Difference, measure: Measure) -> str:
    write = measure.write_difference or measure.write
    unit = " points" if write is points else ""
    if found.half_width == 0:
        return f"{write(found.mean)}{unit}, the same for all seeds"
    width = "" if found.half_width is None else f" ± {write(found.half_width)}"
    return f"{write(found.mean)}{width}{unit}"


def _table(variants: Sequence[VariantRuns], measures: Sequence[Measure]) -> Table:
    """A row for each variant; measures that no run has are left out."""
    shown = [measure for measure in measures if any(map(measure.of, variants))]
    rows = [
        [v.name, *(mean_and_spread(list(m.of(v).values()), m.write) for m in shown)]
        for v in variants
    ]
    return Table(["variant", *(measure.name for measure in shown)], rows)


def _outcome_table(variants: Sequence[VariantRuns]) -> Table:
    table = _table(variants, _OUTCOME)
    rows, has_prompts = [], any(map(held_out_prompts, variants))
    for row, variant in zip(table.rows, variants, strict=True):
        collapsed = sum(collapse(run) is not None for run in variant.runs.values())
        interval = [_accuracy_interval(variant)] if has_prompts else []
        rows.append([*row, *interval, f"{collapsed} of {len(variant.runs)}"])
    interval_head = ["95% interval of the accuracy at the end"] if has_prompts else []
    return Table([*table.head, *interval_head, "collapsed"], rows)


def _accuracy_interval(variant: VariantRuns) -> str:
    accuracies, count = list(_ACCURACY.of(variant).values()), held_out_prompts(variant)
    if count is None or not accuracies or not all(map(math.isfinite, accuracies)):
        return MISSING
    low, high = share_interval(statistics.fmean(accuracies), count)
    return f"{percent(low)} to {percent(high)}, n = {count}"


def _difference_table(variants: Sequence[VariantRuns]) -> Table:
    measures = _compared_measures(variants)
    rows = []
    for one, other in pairs(variants):
        found = [difference(one, other, measure) for measure in measures]
        seeds = max((d.seeds for d in found if d), default=0)
        cells = [
            MISSING if d is None else _interval(d, m) + (", significant" if d.significant else "")
            for d, m in zip(found, measures, strict=True)
        ]
        if seeds:
            rows.append([f"{one.name} − {other.name}", str(seeds), *cells])
    return Table(["difference of", "seeds", *(measure.name for measure in measures)], rows)


def _cost(variants: Sequence[VariantRuns], volatility: bool) -> list[str | Table]:
    """What replay adds to a run, against the run of the same seed without it."""
    seconds = Measure("median step", "perf/step_seconds", _median, duration)
    peak = Measure("peak memory", "perf/peak_memory_bytes", _largest, number)
    stored = Measure("routes", "replay/bytes", _mean, number)
    rows = []
    for variant, baseline in _replay_pairs(variants):
        ours, theirs = seconds.of(variant), seconds.of(baseline)
        longer = [100 * (ours[s] / theirs[s] - 1) for s in ours if s in theirs]
        if not longer:
            continue
        memory = difference(variant, baseline, peak)
        routes = list(stored.of(variant).values())
        rows.append(
            [
                f"{variant.name} over {baseline.name}",
                duration(statistics.fmean(ours.values())),
                f"{statistics.fmean(longer):+.1f}%",
                f"{min(longer):+.1f}% to {max(longer):+.1f}%",
                f"{memory.mean / 1e6:+.1f} MB" if memory else MISSING,
                f"{statistics.fmean(routes):,.0f} B" if routes else MISSING,
            ]
        )
    note = "The time of a step includes rollout, log-probs and updates."
    if volatility:
        note += " Volatility is measured in every variant; both sides include its time."
    head = ["", "median step", "longer by", "over seeds", "peak memory", "stored routes per step"]
    return [note, Table(head, rows)]


def _rules(variants: Sequence[VariantRuns], volatility: bool) -> list[str | Table]:
    rules: list[str | Table] = [_COLLAPSE_RULE]
    if volatility:
        rules.append("`routing.volatility` was switched on in every variant, to compare it.")
    rules.append("Each value is the mean over seeds ± the sample standard deviation.")
    rows = []
    for variant in variants:
        runs = [f"seed {seed}" for seed in variant.runs]
        runs += [f"seed {seed}: {why}, left out" for seed, why in variant.unfinished.items()]
        rows.append([variant.name, " ".join(variant.overrides), "; ".join(runs)])
    return [*rules, Table(["variant", "settings", "runs"], rows)]


def _is_empty(section: ReportSection) -> bool:
    tables = [item for item in section.items if isinstance(item, Table)]
    return not section.items or any(not t.rows or len(t.head) == 1 for t in tables)


def _as_markdown(section: ReportSection, out: Path) -> str:
    parts = [f"## {section.title}"]
    for item in section.items:
        if isinstance(item, Table):
            lines = [item.head, ["---"] * len(item.head), *item.rows]
            parts.append("\n".join(f"| {' | '.join(line)} |" for line in lines))
        elif isinstance(item, Picture):
            parts.append(f"![{item.description}]({item.path.relative_to(out).as_posix()})")
        else:
            parts.append(str(item))
    return "\n\n".join(parts)
