"""What an ablation found, in sentences: only what its figures show by the stated rules."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gspo_megatron.observe import ablation as figures
from gspo_megatron.observe import formats
from gspo_megatron.observe.ablation import Difference, LoadedArm, Measure


@dataclass(frozen=True)
class Compared:
    """A figure by which arms are compared."""

    name: str
    measure: Measure
    write: Callable[[float | None], str]
    write_difference: Callable[[float | None], str]
    unit: str = ""  # of differences


def outcome_of(arms: Sequence[LoadedArm]) -> Compared:
    """Held-out accuracy, or reward where no run has that."""
    accuracy = figures.last("evaluation/accuracy")
    if any(arm.values(accuracy) for arm in arms):
        name = "held-out accuracy at the end"
        return Compared(name, accuracy, formats.percent, formats.points, " points")
    reward = figures.last_window("reward/mean")
    return Compared("reward at the end", reward, formats.fixed, formats.fixed)


def compared(arms: Sequence[LoadedArm]) -> list[Compared]:
    """The outcome, then what replay is meant to act on; of these what the runs have."""
    inside = (
        ("token ratio p01", "ratio/token/p01", formats.fixed),
        ("token ratio p99", "ratio/token/p99", formats.fixed),
        ("mismatch", "mismatch/abs_mean", formats.number),
    )
    subjects = [Compared(name, figures.mean(key), write, write) for name, key, write in inside]
    return [outcome_of(arms), *(s for s in subjects if any(a.values(s.measure) for a in arms))]


def differences(arms: Sequence[LoadedArm], subject: Compared) -> list[Difference]:
    """Of all pairs that can be compared."""
    found = (figures.difference(*pair, subject.measure) for pair in figures.pairs(arms))
    return [difference for difference in found if difference is not None]


def findings(arms: Sequence[LoadedArm]) -> list[str]:
    """One or two sentences a subject; nothing where there are no figures for it."""
    present = [arm for arm in arms if arm.runs]
    found = [*_incomplete(arms), *_outcomes(present), *_verdicts(present), *_collapses(present)]
    return [*found, *_clipping(present), *_routing(present), *_costs(present)]


def _incomplete(arms: Sequence[LoadedArm]) -> list[str]:
    left_out = [
        f"{arm.name} seed {seed} ({why})" for arm in arms for seed, why in arm.unfinished.items()
    ]
    if not left_out:
        return []
    return [f"Left out, because they did not come to their end: {'; '.join(left_out)}."]


def _outcomes(arms: Sequence[LoadedArm]) -> list[str]:
    outcome = outcome_of(arms)
    measure, name, write = outcome.measure, outcome.name, outcome.write
    by_arm = {}
    for arm in arms:
        spread = figures.spread(list(arm.values(measure).values()))
        if spread is not None and math.isfinite(spread.mean):
            by_arm[arm.name] = spread
    if not by_arm:
        return []
    best = max(by_arm, key=lambda arm: by_arm[arm].mean)
    worst = min(by_arm, key=lambda arm: by_arm[arm].mean)
    low, high = write(by_arm[worst].mean), write(by_arm[best].mean)
    ends = f"from {low} ({worst}) to {high} ({best}), means of arms" if low != high else low
    said = [f"{name[0].upper()}{name[1:]}: {ends}."]
    deviations = [s.deviation for s in by_arm.values() if s.deviation is not None]
    if deviations:
        said[0] += f" Seeds of one arm spread by {write(statistics.fmean(deviations))} on average."
    return said


def _verdicts(arms: Sequence[LoadedArm]) -> list[str]:
    """Which pairs are told apart, by each figure."""
    said = []
    for subject in compared(arms):
        found = differences(arms, subject)
        judged = [d for d in found if d.half_width is not None]
        if found and not judged:
            return ["With one seed nothing can be said about differences."]
        apart = [d for d in judged if d.told_apart]
        if not judged:
            continue
        if not apart:
            said.append(
                f"By {subject.name}, none of the {len(judged)} pairs compared is told apart: each "
                "difference lies within what the seeds alone make likely. This is no evidence that "
                "the arms are equal."
            )
            continue
        rest = len(judged) - len(apart)
        more = f" The other {'one is' if rest == 1 else f'{rest} are'} not." if rest else ""
        texts = "; ".join(_in_words(d, subject) for d in apart)
        said.append(f"By {subject.name}, of {len(judged)} pairs told apart: {texts}.{more}")
    return said


def _in_words(found: Difference, subject: Compared) -> str:
    side = "above" if found.mean > 0 else "below"
    size = f"{subject.write_difference(abs(found.mean))}{subject.unit}"
    width = f"± {subject.write_difference(found.half_width)}"
    return f"{found.arm} {side} {found.other} by {size} ({width})"


def _collapses(arms: Sequence[LoadedArm]) -> list[str]:
    runs = [(arm, seed, run) for arm in arms for seed, run in arm.runs.items()]
    reasons = [(arm.name, seed, figures.collapse(run)) for arm, seed, run in runs]
    told = [f"{name} seed {seed} ({why})" for name, seed, why in reasons if why]
    if not told:
        return [f"None of the {len(runs)} runs collapsed by the rule below."]
    return [f"Collapsed, {len(told)} of {len(runs)} runs: {'; '.join(told)}."]


def _ranges(arms: Sequence[LoadedArm], key: str, write: Callable[[float | None], str]) -> str:
    """The arms' means, each with its name."""
    means = []
    for arm in arms:
        spread = figures.spread(list(arm.values(figures.mean(key)).values()))
        if spread is not None:
            means.append(f"{arm.name} {write(spread.mean)}")
    return ", ".join(means)


def _clipping(arms: Sequence[LoadedArm]) -> list[str]:
    clipped = _ranges(arms, "clip/token/binding", formats.percent)
    return [f"Share of tokens whose gradient was clipped away: {clipped}."] if clipped else []


def _routing(arms: Sequence[LoadedArm]) -> list[str]:
    subjects = (
        ("Volatility, the mean share of expert choices that changed", "routing/volatility"),
        ("Mismatch, the mean log-prob difference of trainer and rollout", "mismatch/abs_mean"),
    )
    said = []
    for name, key in subjects:
        text = _ranges(arms, key, formats.percent if "volatility" in key else formats.number)
        if text:
            said.append(f"{name}: {text}.")
    return said


def _costs(arms: Sequence[LoadedArm]) -> list[str]:
    by_name = {arm.name: arm for arm in arms}
    texts = []
    for arm in arms:
        baseline = by_name.get(arm.arm.baseline or "")
        cost = figures.cost(arm, baseline) if baseline else None
        if cost is None:
            continue
        low, high = 100 * min(cost.time), 100 * max(cost.time)
        text = f"{cost.arm} {100 * statistics.fmean(cost.time):+.1f}%"
        texts.append(f"{text} ({low:+.1f}% to {high:+.1f}%)" if len(cost.time) > 1 else text)
    return [f"Median step with replay over without, by seed: {'; '.join(texts)}."] if texts else []
