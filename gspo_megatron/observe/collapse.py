"""Detects from the metrics of a run's steps that its policy collapses. docs/campaigns.md states the
rule, and how often it was right on stored runs.

The figures are means over the last WINDOW steps. They are compared with the run's best stretch: at
most STRETCH consecutive steps, those with the highest mean reward. Each of the following is an
alarm:

    the reward is more than FALL below the best stretch,
    the reward is more than FALL / 2 below it, and another figure is out of its range (`_SIGNS`),
    a figure is not finite.

A fall is measured as a share of the best reward or of the standard deviation of single rewards,
whichever is larger. So noise does not count as a fall, even if rewards are small or negative. The
fall must also be larger than noise explains: CLEAR standard errors of the difference, and more in a
longer run, in which the best stretch and the worst window are more extreme by chance.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from gspo_megatron.observe.progress import number

WINDOW = 5  # steps: a single step is noisy
FALL = 0.25  # in examples/evidence, all collapsed runs fall this far, and no converged run does
STRETCH = 20
CLEAR = 2.0  # plus sqrt(2 ln(windows)), about the largest of `windows` normal numbers

REWARD, SPREAD = "reward/mean", "reward/std"


class Sign(NamedTuple):
    """The range of a figure: from `least` to `most` times its value in the best stretch, and at
    most `more` above this value. A figure below `floor` is never too large."""

    name: str
    most: float = math.inf
    least: float = 0.0
    more: float = math.inf
    floor: float = 0.0


_SIGNS = {
    "policy/entropy": Sign("entropy", most=2.0, least=0.25),
    "grad_norm": Sign("gradient norm", most=4.0),
    # The next two figures have floors, because single tokens may have large ratios, and rounding
    # gives some mismatch.
    "ratio/token/max": Sign("largest token ratio", most=10.0, floor=20.0),
    "mismatch/k3": Sign("mismatch of trainer and rollout", most=10.0, floor=1e-3),
    "response/length_mean": Sign("length of responses", most=2.0, least=0.5),
    "response/truncated": Sign("share of cut responses", more=0.25),
}
_FINITE = (REWARD, "grad_norm", "loss")
_KEPT = (REWARD, SPREAD, *_SIGNS)


class Alarm(NamedTuple):
    """A detected collapse."""

    step: int
    healthy: int  # the last step whose policy was healthy for sure
    text: str

    @property
    def collapse(self) -> str:
        """The beginning of all messages about the collapse."""
        return f"the policy collapses: {self.text}"


@dataclass
class CollapseWatch:
    """Applies the rule step by step. Its state has a bounded size, and JSON stores it exactly."""

    recent: list[dict[str, float]] = field(default_factory=list)  # figures of the last steps
    best: dict[str, float] = field(default_factory=dict)  # the best stretch
    best_step: int = 0  # the last step of the best stretch
    best_size: int = 0
    steps: int = 0  # number of steps with rewards
    squares: float = 0.0  # sum of squared reward changes
    healthy: int = 0  # the last step of the last healthy window
    alarm: Alarm | None = None  # until the run is healthy again

    def __post_init__(self) -> None:
        if self.alarm is not None:  # JSON makes a list of it
            self.alarm = Alarm(*self.alarm)

    def state(self) -> dict[str, Any]:
        """Return the fields as values that JSON can hold."""
        return asdict(self)

    def forget_rewards(self) -> None:
        """Forget the rewards so far. Call this method when prompts, rewards or lengths change,
        because such a change also changes the figures. The last healthy step is kept."""
        self.recent, self.best, self.best_step, self.best_size = [], {}, 0, 0
        self.steps, self.squares, self.alarm = 0, 0.0, None

    @property
    def healthy_step(self) -> int:
        """The last step after which the run was healthy for sure: the whole window after it looked
        healthy, too."""
        return max(self.healthy - WINDOW, 0)

    def add(self, step: int, metrics: Mapping[str, Any]) -> Alarm | None:
        """Take the metrics of one more step. Returns the alarm if there is one at this step. After
        an alarm there is no second alarm until the run is healthy again."""
        problem = self._judge(step, metrics)
        if self.healthy == step:
            self.alarm = None
        if problem is None or self.alarm is not None:
            return None
        self.alarm = Alarm(step, self.healthy_step, problem)
        return self.alarm

    def lose(self, step: int, text: str) -> Alarm:
        """Return the alarm of a step whose update has lost the weights."""
        self.alarm = Alarm(step, self.healthy_step, text)
        return self.alarm

    def _judge(self, step: int, metrics: Mapping[str, Any]) -> str | None:
        """Return what is wrong at this step, or None."""
        for key in _FINITE:
            value = metrics.get(key, 0.0)
            if value is None or not math.isfinite(value):
                return f"{key} is not finite"
        if REWARD not in metrics:
            return None
        known = {k: float(metrics[k]) for k in _KEPT if metrics.get(k) is not None}
        if self.recent:
            self.squares += (known[REWARD] - self.recent[-1][REWARD]) ** 2
        self.recent = [*self.recent, known][-STRETCH:]
        self.steps += 1
        if len(self.recent) < WINDOW:
            self.healthy = step  # a run with too few steps counts as healthy
            return None
        stretch, now = _means(self.recent), _means(self.recent[-WINDOW:])
        if not self.best or stretch[REWARD] >= self.best[REWARD]:
            self.best, self.best_step, self.best_size = stretch, step, len(self.recent)
        best = self.best[REWARD]
        lost = best - now[REWARD]
        fall = lost / max(abs(best), self.best.get(SPREAD, 0.0), 1e-12)
        if fall <= FALL / 2:
            self.healthy = step
            return None
        signs = _out_of_range(self.best, now)
        if lost <= self._noise() or (fall <= FALL and not signs):
            return None
        figures = [f"reward {number(best)} -> {number(now[REWARD])}", *signs]
        when = f"from the best steps, up to {self.best_step}, to the last, up to {step}"
        return f"{when}: {', '.join(figures)}"

    def _noise(self) -> float:
        """Return the largest fall of the reward that noise alone explains in a run of this
        length."""
        variance = self.squares / (self.steps - 1) / 2  # variance of one step's reward
        error = math.sqrt(variance * (1 / WINDOW + 1 / self.best_size))
        return (CLEAR + math.sqrt(2 * math.log(self.steps / WINDOW))) * error


def _means(steps: list[dict[str, float]]) -> dict[str, float]:
    """Return the means of the figures that all steps have."""
    shared = [key for key in steps[0] if all(key in each for each in steps)]
    return {key: statistics.fmean(each[key] for each in steps) for key in shared}


def _out_of_range(best: Mapping[str, float], now: Mapping[str, float]) -> list[str]:
    """Return a text for each figure that is out of its range."""
    texts = []
    for key, sign in _SIGNS.items():
        if key not in best or key not in now:
            continue
        before, after = best[key], now[key]
        high = after > sign.most * before or after > before + sign.more
        if (high and after >= sign.floor) or after < sign.least * before:
            texts.append(f"{sign.name} {number(before)} -> {number(after)}")
    return texts
