"""Warnings about a run from its metrics, each with advice.

The thresholds of every rule are below, with their reasons. The rules about exploration are silent
while the task is solved: a policy that is always right has no entropy, and its groups have equal
rewards.
"""

from __future__ import annotations

import math
import statistics
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from gspo_megatron.config.objectives import ObjectiveSection, resolve_objective
from gspo_megatron.observe.metrics_files import RL, Record, series
from gspo_megatron.observe.progress import number, percent

WINDOW = 5  # rules use means over this many steps, because single steps are noisy
# Gradient norms of the demo vary by a factor of 4 from step to step. A bug that trained a row of
# weights by mistake gave norms 60 to 400 times the usual one.
SPIKE = 10.0  # times the running median
MEDIAN_OF = 20  # the running median at a step is over this many steps before it
# A share of the first window's entropy. The entropy of the demo falls to a sixth while the policy
# is still learning.
ENTROPY_LEFT = 0.1
# A share of rollout.max_response_tokens. If the mean length is above it, many responses are cut
# off.
LENGTH_OF_CAP = 0.8
# times the mean length of the first window, because answers may be long from the start
LENGTH_GROWTH = 1.5
REPEATED = 0.1  # share of repeated text
# times the share in the first window, because lists and tables repeat words, too
REPEATED_GROWTH = 2.0
TRUNCATED = 0.25  # share of the responses that are truncated, and so have no answer
TRUNCATED_GROWTH = 2.0
# Share of groups with equal rewards. These groups have no gradient, so three quarters of the
# rollout are useless.
ZERO_SPREAD = 0.75
ZERO_SPREAD_STEPS = 10  # warn after this many steps in a row; fewer may be chance
# Share of steps with a difference above the clip range. A single step of this kind is harmless.
NOISY_STEPS = 0.1
SLOW_REWARDS = 0.5  # share of a step's time spent waiting for rewards
SOLVED = 0.9  # mean reward of a window, as a share of evaluation.correct_at

_STEPS_SHOWN = 5

Config = Mapping[str, Mapping[str, Any]]  # config.resolved.yaml, or a part of it


class Finding(NamedTuple):
    """One warning about a run."""

    metric: str
    steps: tuple[int, ...]
    text: str  # what is wrong
    advice: str

    def __str__(self) -> str:
        return f"{self.metric}, {write_steps(self.steps)}: {self.text}. {self.advice}"


def advise(
    records: Sequence[Record],
    config: Config | None = None,
    phase: str = RL,
    changed: Mapping[int, Config] | None = None,
) -> list[Finding]:
    """Return the warnings about a run. records, config: from metrics.jsonl and config.resolved.yaml
    of the run folder. changed: for each step from which a run has other values, its configuration
    from then on.

    A rule is silent if the metrics or configuration keys that it needs are missing."""
    curves = _Curves(records, config or {}, phase, changed or {})
    return [finding for rule in _RULES for finding in rule(curves)]


def write_steps(steps: Sequence[int]) -> str:
    """Write steps as text: "step 3" or "steps 3, 7 to 9 and 4 more"."""
    runs = [
        [step for _, step in run]
        for _, run in groupby(enumerate(steps), key=lambda pair: pair[1] - pair[0])
    ]
    texts = [f"{run[0]} to {run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs]
    more = sum(map(len, runs[_STEPS_SHOWN:]))
    end = f" and {more} more" if more else ""
    return f"step{'s' * (len(steps) > 1)} {', '.join(texts[:_STEPS_SHOWN])}{end}"


class _Curves:
    """The metrics of a run's steps."""

    def __init__(
        self, records: Sequence[Record], config: Config, phase: str, changed: Mapping[int, Config]
    ) -> None:
        self._records, self._phase = records, phase
        self._configs = {0: config, **dict(sorted(changed.items()))}

    def of(self, key: str) -> dict[int, float]:
        """Return the finite values of a metric, by step."""
        steps, values = series(self._records, key, self._phase)
        return {s: v for s, v in zip(steps, values, strict=True) if s > 0 and math.isfinite(v)}

    def windows(self, key: str) -> dict[int, float]:
        """Return the mean of each window of WINDOW steps, by its last step. The result is empty if
        there are fewer steps."""
        steps, values = list(self.of(key)), list(self.of(key).values())
        ends = range(WINDOW, len(steps) + 1)
        return {steps[end - 1]: statistics.fmean(values[end - WINDOW : end]) for end in ends}

    def section(self, name: str, step: int) -> Mapping[str, Any]:
        """Return a section of the configuration that the run has at a step."""
        first = max(first for first in self._configs if first <= step)
        return self._configs[first].get(name) or {}

    def sections(self, name: str) -> list[Mapping[str, Any]]:
        """Return the different values of a section, in the order of the steps."""
        values: list[Mapping[str, Any]] = []
        for config in self._configs.values():
            if (section := config.get(name) or {}) not in values:
                values.append(section)
        return values

    def unsolved(self, steps: Iterable[int]) -> list[int]:
        """Return the `steps` at which the task is not solved yet."""
        rewards = self.windows("reward/mean")

        def enough(step: int) -> float:
            return SOLVED * self.section("evaluation", step).get("correct_at", 1.0)

        return [step for step in steps if rewards.get(step, -math.inf) < enough(step)]


def _gradient_spikes(curves: _Curves) -> Iterator[Finding]:
    norms, equal = curves.of("grad_norm"), curves.of("reward/zero_spread_groups")
    recent: deque[float] = deque(maxlen=MEDIAN_OF)
    every: list[float] = []  # sorted
    spikes = []
    for step, norm in norms.items():
        # Also compare with the median of all earlier steps, because late in a run the recent norms
        # are small: few groups still have different rewards.
        if len(every) >= WINDOW and norm > SPIKE * max(map(statistics.median, (recent, every))):
            spikes.append(step)
        # if all groups have equal rewards, the rewards give no gradient
        if equal.get(step, 0.0) < 1:
            recent.append(norm)
            insort(every, norm)
    if spikes:
        largest = max(norms[step] for step in spikes)
        text = f"gradient spikes, up to {number(largest)}, over {SPIKE:g} times the running median"
        advice = (
            "Clipping (optimizer.clip_grad) scales such an update down as a whole, so the step is "
            "nearly lost: look at ratio/token/max and samples.jsonl there, or lower "
            "optimizer.learning_rate."
        )
        yield Finding("grad_norm", tuple(spikes), text, advice)


def _entropy_collapse(curves: _Curves) -> Iterator[Finding]:
    means = curves.windows("policy/entropy")
    start = next(iter(means.values()), 0.0)
    low = curves.unsolved(step for step, mean in means.items() if mean < ENTROPY_LEFT * start)
    if low:
        text = f"entropy collapse, from {number(start)} to {number(means[low[-1]])} nats per token"
        advice = (
            "The policy no longer explores and the task is not solved: raise objective.clip_high, "
            "lower optimizer.learning_rate, or add objective.kl or objective.entropy_coefficient."
        )
        yield Finding("policy/entropy", tuple(low), text, advice)


def _collapse(curves: _Curves) -> Iterator[Finding]:
    alarms = curves.of("collapse/alarm")
    if alarms:
        text = "the policy collapses: the reward falls, by the rule of docs/campaigns.md"
        advice = (
            "Set training.on_collapse = rollback, or continue an earlier checkpoint with other "
            "values: gspo-megatron train RUN --from-step N section.key=value."
        )
        yield Finding("collapse/alarm", tuple(alarms), text, advice)


def _length_explosion(curves: _Curves) -> Iterator[Finding]:
    def allowed(step: int) -> float:
        """Return the longest response that is allowed in the window that ends with a step."""
        rollouts = [curves.section("rollout", max(at, 0)) for at in (step - WINDOW + 1, step)]
        return max(rollout.get("max_response_tokens", math.inf) for rollout in rollouts)

    def long(step: int) -> float:
        return LENGTH_OF_CAP * allowed(step)

    advice = (
        "Raise rollout.max_response_tokens if right answers need it; otherwise set "
        "reward.overlong_buffer, which penalizes long answers."
    )
    tokens, shares = "mean length of {} tokens, with {} allowed", "share cut off of {}"
    for key, least, growth, text, write in (
        ("response/length_mean", long, LENGTH_GROWTH, tokens, number),
        ("response/truncated", lambda _: TRUNCATED, TRUNCATED_GROWTH, shares, percent),
    ):
        means = curves.windows(key)
        start = next(iter(means.values()), 0.0)
        high = [s for s, mean in means.items() if mean >= least(s) and mean >= growth * start]
        if high:
            grown = f"{write(start)} at the start and {write(means[high[-1]])} then"
            what = text.format(grown, allowed(high[-1]))
            yield Finding(key, tuple(high), f"length explosion, {what}", advice)


def _gamed_model(curves: _Curves) -> Iterator[Finding]:
    scores = curves.windows("reward_model/mean")
    first = next(iter(scores.values()), math.inf)
    better = {step for step, score in scores.items() if score > first}
    advice = (
        "The policy may be gaming the reward model: read samples.jsonl there, raise "
        "reward.repetition_penalty or objective.kl_coefficient, or use an earlier checkpoint."
    )
    for key, least, growth, text, write in (
        ("response/repeated", REPEATED, REPEATED_GROWTH, "repeated text: a share of {}", percent),
        ("response/length_mean", 0.0, LENGTH_GROWTH, "mean length of {} tokens", number),
    ):
        means = curves.windows(key)
        start = next(iter(means.values()), 0.0)
        high = [
            step
            for step, mean in means.items()
            if step in better and mean >= least and mean >= growth * start
        ]
        if high:
            grown = f"{write(start)} at the start and {write(means[high[-1]])} then"
            what = f"the reward model's score rises with {text.format(grown)}"
            yield Finding(key, tuple(high), what, advice)


def _equal_rewards(curves: _Curves) -> Iterator[Finding]:
    shares = curves.of("reward/zero_spread_groups")
    if curves.of("distill/kl"):  # the teacher gives a gradient, too
        return
    equal = set(curves.unsolved(step for step, share in shares.items() if share >= ZERO_SPREAD))
    streaks = [list(steps) for _, steps in groupby(shares, key=equal.__contains__)]
    long = (steps for steps in streaks if steps[0] in equal and len(steps) >= ZERO_SPREAD_STEPS)
    wasted = [step for steps in long for step in steps]
    if wasted:
        text = f"at least {ZERO_SPREAD:.0%} of the groups have equal rewards, and so no gradient"
        advice = (
            "The prompts are too hard or too easy: choose others, give partial credit in the "
            "reward, raise rollout.group_size, or set rollout.dynamic_sampling = true."
        )
        yield Finding("reward/zero_spread_groups", tuple(wasted), text, advice)


def _mismatch(curves: _Curves) -> Iterator[Finding]:
    for values in curves.sections("objective"):
        yield from _mismatch_under(values, curves)


def _mismatch_under(values: Mapping[str, Any], curves: _Curves) -> Iterator[Finding]:
    """Yield the warning about the steps that have this objective."""
    try:
        section = ObjectiveSection(**values)
    except ValueError:  # another release wrote the configuration
        return
    if section.import_path is not None or not values:
        return
    recipe = resolve_objective(section)
    bounds = [recipe.parameters[k] for k in ("clip_low", "clip_high") if k in recipe.parameters]
    key = "ratio/noise_floor" if recipe.clips_sequences else "mismatch/abs_mean"
    stale = curves.of("staleness/max")  # older weights explain the mismatch of stale responses
    floors = {
        step: floor
        for step, floor in curves.of(key).items()
        if not stale.get(step) and curves.section("objective", step) == values
    }
    above = [step for step, floor in floors.items() if bounds and floor > min(bounds)]
    if above and len(above) >= NOISY_STEPS * len(floors):
        text = (
            f"trainer and rollout engine differ by {number(max(floors[s] for s in above))}, more "
            f"than the clip range {min(bounds):g}"
        )
        if section.old_logprobs == "rollout":
            advice = (
                "The clip cuts noise: set objective.old_logprobs = recompute, or a wider range."
            )
        else:
            advice = "The samples are off-policy by more than an update: set objective.correction."
        yield Finding(key, tuple(above), text, advice)


def _failed_rewards(curves: _Curves) -> Iterator[Finding]:
    for key, what in (("reward/errors", "failed"), ("reward/timeouts", "timed out")):
        failed = {step: count for step, count in curves.of(key).items() if count > 0}
        if failed:
            text = f"rewards {what}, up to {max(failed.values()):g} in a step"
            advice = "Look for the reason in the log; the reward's own service may be overloaded."
            yield Finding(key, tuple(failed), text, advice)


def _slow_rewards(curves: _Curves) -> Iterator[Finding]:
    scoring, whole = curves.windows("perf/reward_seconds"), curves.windows("perf/step_seconds")
    shares = {step: scoring[step] / whole[step] for step in scoring if whole.get(step)}
    slow = [step for step, share in shares.items() if share >= SLOW_REWARDS]
    # vLLM servers generate during scoring, so slow rewards cost time only if trainer and servers
    # are idle.
    for key in ("perf/trainer_idle_share", "perf/engines_idle_share"):
        idle = curves.windows(key)
        slow = [step for step in slow if not idle or idle.get(step, 0.0) >= SLOW_REWARDS]
    if slow:
        text = f"rewards are slow, up to {percent(max(shares[s] for s in slow))} of the steps' time"
        advice = (
            "Raise reward.workers, or make the function async if it waits for a service (then look "
            "at that service)."
        )
        yield Finding("perf/reward_seconds", tuple(slow), text, advice)


_RULES: tuple[Callable[[_Curves], Iterator[Finding]], ...] = (
    _collapse,
    _gradient_spikes,
    _entropy_collapse,
    _length_explosion,
    _equal_rewards,
    _gamed_model,
    _mismatch,
    _failed_rewards,
    _slow_rewards,
)
