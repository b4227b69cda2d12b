"""The figures of an ablation: arms, each run with several seeds; from metrics.jsonl alone.

Nothing here decides by eye: what counts as a collapse, and when two arms are told apart, is a rule
that the report states.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gspo_megatron.errors import DataError
from gspo_megatron.observe.records import METRICS_FILE, RL, read_metrics
from gspo_megatron.observe.runs import Run
from gspo_megatron.observe.summary import steps_done

# A window is a tenth of the run, but no less than so many steps: rewards are noisy.
SMALLEST_WINDOW = 5
COLLAPSED_BELOW = 0.5  # of the best

COLLAPSE_RULE = (
    "A run has collapsed when a reward, loss or gradient norm of its RL steps is not finite, or "
    "when the mean reward of its last window of steps is below half of the best mean reward that "
    f"any window of it had. A window is a tenth of the steps, at least {SMALLEST_WINDOW}; a run of "
    "fewer than two windows, or whose best window is not above 0, is judged by finiteness alone."
)
APART_RULE = (
    "Two arms are compared seed by seed: runs of one seed start from the same weights and draw the "
    "same prompts. They are told apart when the 95% interval of the mean difference (Student's t "
    "over the seeds that both have) leaves out 0. This is done for each pair listed, without a "
    "correction for their number: of twenty pairs without any difference, one is told apart."
)

# 97.5% quantiles of Student's t, by degrees of freedom from 1.
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
_STUDENT_BEYOND = 2.228  # a little too wide for more than eleven seeds, never too narrow

Measure = Callable[[Run], "float | None"]


@dataclass(frozen=True)
class Arm:
    """One setting and where its runs are."""

    name: str
    settings: Sequence[str]  # what it changes in the configuration
    steps: int  # of RL in a run that has come to its end
    folders: Mapping[int, Path]  # by seed
    baseline: str | None = None  # the arm that differs from it by having no replay


@dataclass(frozen=True)
class LoadedArm:
    """An arm with the metrics of its finished runs."""

    arm: Arm
    runs: dict[int, Run] = field(default_factory=dict)  # by seed
    unfinished: dict[int, str] = field(default_factory=dict)  # by seed: how far it got

    @property
    def name(self) -> str:
        return self.arm.name

    def values(self, measure: Measure) -> dict[int, float]:
        """A figure of each run that has it, by seed."""
        found = {seed: measure(run) for seed, run in self.runs.items()}
        return {seed: value for seed, value in found.items() if value is not None}


def load_arms(arms: Sequence[Arm]) -> list[LoadedArm]:
    """Read all runs. Only those that reached their last step count: half a run against whole ones
    would be a comparison of lengths. Raises DataError for a damaged file."""
    loaded = []
    for arm in arms:
        result = LoadedArm(arm)
        for seed, folder in arm.folders.items():
            if not (folder / METRICS_FILE).is_file():
                result.unfinished[seed] = "no run"
                continue
            run = Run(folder, f"{arm.name}, seed {seed}", arm.name, tuple(read_metrics(folder)))
            done = steps_done(run.records)
            if done < arm.steps:
                result.unfinished[seed] = f"ends at step {done} of {arm.steps}"
            else:
                result.runs[seed] = run
        loaded.append(result)
    return loaded


def is_finished(folder: Path, steps: int) -> bool:
    """Whether a run folder holds a run that reached its last step."""
    try:
        return steps_done(read_metrics(folder)) >= steps
    except DataError:  # no metrics, or damaged ones
        return False


def last(key: str) -> Measure:
    """A figure's last value."""

    def measure(run: Run) -> float | None:
        values = run.series(key)[1]
        return values[-1] if values else None

    return measure


def first(key: str) -> Measure:
    """A figure's first value."""

    def measure(run: Run) -> float | None:
        values = run.series(key)[1]
        return values[0] if values else None

    return measure


def mean(key: str) -> Measure:
    """A figure's mean over the steps at which it is finite."""
    return _of_finite(key, statistics.fmean)


def median(key: str) -> Measure:
    """A figure's median, likewise."""
    return _of_finite(key, statistics.median)


def largest(key: str) -> Measure:
    """A figure's largest value."""
    return _of_finite(key, max)


def smallest(key: str) -> Measure:
    """A figure's smallest value."""
    return _of_finite(key, min)


def _of_finite(key: str, reduce: Callable[[list[float]], float]) -> Measure:
    def measure(run: Run) -> float | None:
        finite = [value for value in run.series(key)[1] if math.isfinite(value)]
        return reduce(finite) if finite else None

    return measure


def last_window(key: str) -> Measure:
    """A figure's mean over the last window of the run."""

    def measure(run: Run) -> float | None:
        means = running_means(run.series(key)[1])
        return means[-1] if means else None

    return measure


def window(steps: int) -> int:
    """How many steps make a window of a run of `steps`."""
    return max(SMALLEST_WINDOW, math.ceil(steps / 10))


def running_means(values: Sequence[float]) -> list[float]:
    """The means of all windows in order; of a run shorter than one, the mean of all of it."""
    size = min(window(len(values)), len(values))
    if size == 0:
        return []
    return [statistics.fmean(values[end - size : end]) for end in range(size, len(values) + 1)]


def collapse(run: Run) -> str | None:
    """Why a run counts as collapsed by COLLAPSE_RULE; None: it does not."""
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


def largest_fall(run: Run) -> float | None:
    """How far the windowed mean reward ever fell below the best that it had had before."""
    fall, best = 0.0, -math.inf
    means = running_means(run.series("reward/mean")[1])
    for value in means:
        best = max(best, value)
        fall = max(fall, best - value)
    return fall if means else None


@dataclass(frozen=True)
class Spread:
    """A figure over seeds."""

    mean: float
    deviation: float | None  # sample standard deviation; None with one seed
    count: int


def spread(values: Sequence[float]) -> Spread | None:
    """Mean and sample standard deviation of what there is; None of nothing."""
    if not values:
        return None
    deviation = _deviation(values) if len(values) > 1 else None
    return Spread(statistics.fmean(values), deviation, len(values))


def _deviation(values: Sequence[float]) -> float:
    """Sample standard deviation; NaN of NaN, of which `statistics` makes a crash."""
    return statistics.stdev(values) if all(map(math.isfinite, values)) else math.nan


@dataclass(frozen=True)
class Difference:
    """Of one arm's figure to another's, seed by seed."""

    arm: str
    other: str
    mean: float
    half_width: float | None  # of the 95% interval; None with one seed
    seeds: int

    @property
    def told_apart(self) -> bool:
        return self.half_width is not None and abs(self.mean) > self.half_width


def difference(arm: LoadedArm, other: LoadedArm, measure: Measure) -> Difference | None:
    """`arm` less `other` over the seeds that both have; None where they share none."""
    of_arm, of_other = arm.values(measure), other.values(measure)
    differences = [of_arm[seed] - of_other[seed] for seed in sorted(of_arm.keys() & of_other)]
    found = spread(differences)
    if found is None or not math.isfinite(found.mean):
        return None
    half_width = None
    if found.deviation is not None:
        freedom = found.count - 1
        student = _STUDENT[freedom - 1] if freedom <= len(_STUDENT) else _STUDENT_BEYOND
        half_width = student * found.deviation / math.sqrt(found.count)
    return Difference(arm.name, other.name, found.mean, half_width, found.count)


def pairs(arms: Sequence[LoadedArm]) -> list[tuple[LoadedArm, LoadedArm]]:
    """What is compared: every arm to the first one, and replay to the arm without it."""
    by_name = {arm.name: arm for arm in arms}
    found = [(arm, arms[0]) for arm in arms[1:]]
    for arm in arms:
        baseline = by_name.get(arm.arm.baseline or "")
        if baseline is not None and baseline is not arms[0]:
            found.append((arm, baseline))
    return found


@dataclass(frozen=True)
class Cost:
    """What replay adds to a run, against the run of the same seed without it."""

    arm: str
    baseline: str
    step_seconds: float  # median of a step, mean over seeds
    time: list[float]  # by seed: by which share the median step is longer
    memory: list[float]  # by seed: by how many bytes the peak memory is larger
    bytes_stored: float | None  # of routes a step


def cost(arm: LoadedArm, baseline: LoadedArm) -> Cost | None:
    """None where no seed has both arms, or the runs did not time their steps."""
    seconds = median("perf/step_seconds")
    ours, theirs = arm.values(seconds), baseline.values(seconds)
    shared = sorted(ours.keys() & theirs)
    if not shared:
        return None
    peak = largest("perf/peak_memory_bytes")
    our_peaks, their_peaks = arm.values(peak), baseline.values(peak)
    stored = spread(list(arm.values(mean("replay/bytes")).values()))
    return Cost(
        arm.name,
        baseline.name,
        statistics.fmean(ours[seed] for seed in shared),
        [ours[seed] / theirs[seed] - 1.0 for seed in shared],
        [our_peaks[s] - their_peaks[s] for s in shared if s in our_peaks and s in their_peaks],
        None if stored is None else stored.mean,
    )


@dataclass(frozen=True)
class Band:
    """A figure over steps: mean and standard deviation over seeds."""

    steps: list[int]
    means: list[float]
    deviations: list[float]  # 0 with one seed


def band(arm: LoadedArm, key: str) -> Band | None:
    """At the steps that all runs of the arm have; None where they do not have the figure."""
    tables = [dict(zip(*run.series(key, RL), strict=True)) for run in arm.runs.values()]
    if not tables or not all(tables):
        return None
    steps = sorted(set.intersection(*(set(table) for table in tables)))
    columns = [[table[step] for table in tables] for step in steps]
    deviations = [_deviation(c) if len(c) > 1 else 0.0 for c in columns]
    return Band(steps, [statistics.fmean(c) for c in columns], deviations)
