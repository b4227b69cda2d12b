"""Rules that judge the runs of frontier.py: outcomes, bisection, intervals. They were fixed before
the first run. This file trains nothing.

The curve of a run is the mean reward of the responses drawn in each of its STEPS steps. The curve's
start is the reward of step 1, whose responses come from the start model. The curve's end is the
mean of the last LAST steps.

    converged  the end is at least halfway from the start to 1
    collapsed  the end is below half of the start
    stuck      anything between

A run that falls and recovers is judged by its end. A value of a setting holds if the runs of all
SEEDS seeds pass, which usually means that the runs converge. The seeds are run one after the other.
After the first run that fails, the remaining seeds are not run.

A collapse heals if a second run from an earlier checkpoint converges. The second run has new
prompts and samples, and otherwise the same settings. Its outcome is computed with the start of the
first run. The checkpoint is the newest one for which the mean reward of the LAST steps before it
was at least the start. If there is no such checkpoint, the second run begins with the start model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from scipy.stats import beta

STEPS, LAST, SEEDS = 40, 5, 5
CHECKPOINTS_EVERY = 10

Record = dict[str, Any]  # a line of the results


def outcome(rewards: Sequence[float], start: float) -> str:
    """The outcome of a whole run: converged, collapsed or stuck."""
    end = mean(rewards[-LAST:])
    if end >= start + (1 - start) / 2:
        return "converged"
    return "collapsed" if end < start / 2 else "stuck"


def last_good_checkpoint(rewards: Sequence[float], start: float) -> int:
    """The step of the newest checkpoint before a collapse; 0 stands for the start model."""
    saved = range(CHECKPOINTS_EVERY, len(rewards), CHECKPOINTS_EVERY)
    good = [step for step in saved if mean(rewards[step - LAST : step]) >= start]
    return max(good, default=0)


def lowest(rewards: Sequence[float]) -> float:
    """The lowest mean of LAST consecutive steps, which shows how far a run falls."""
    return min(mean(rewards[at : at + LAST]) for at in range(len(rewards) - LAST + 1))


def largest_that_holds(values: Sequence[float], holds: Callable[[float], bool]) -> float | None:
    """The largest of the rising `values` that holds, by bisection; None if even the smallest fails.

    The bisection assumes that if a value holds, all smaller values hold, too.
    """
    good, bad = -1, len(values)  # index of a value that holds, and of a value that does not hold
    while bad - good > 1:
        middle = (good + bad) // 2
        if holds(values[middle]):
            good = middle
        else:
            bad = middle
    return values[good] if good >= 0 else None


def all_seeds(passes: Callable[[int], bool], seeds: int = SEEDS) -> bool:
    """Whether the runs of all seeds pass. After the first run that fails, no further run is
    made."""
    return all(passes(seed) for seed in range(1, seeds + 1))


def interval(hits: int, count: int, level: float = 0.95) -> tuple[float, float]:
    """Clopper and Pearson's interval for a share. At least `level` of such intervals contain the
    true share."""
    tail = (1 - level) / 2
    low = float(beta.ppf(tail, hits, count - hits + 1)) if hits else 0.0
    high = float(beta.ppf(1 - tail, hits + 1, count - hits)) if hits < count else 1.0
    return low, high


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
