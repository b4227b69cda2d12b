"""The rule that finds collapses. It is tested on the rewards in examples/evidence, on recorded runs
of the demo, and on made-up metrics."""

from __future__ import annotations

import csv
import json
import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest

from gspo_megatron.observe import collapse
from gspo_megatron.observe.collapse import FALL, WINDOW, Alarm, CollapseWatch

ROOT = Path(__file__).parents[3]
KEPT = ROOT / "examples/evidence/results/frontier.jsonl"
# The rewards of 16 good steps. Tests add values of other metrics for the same steps.
GOOD = [0.5, 0.52, 0.48, 0.5] * 4


def records(
    rewards: Sequence[float | None], **figures: Sequence[float | None]
) -> list[dict[str, Any]]:
    """Records of steps from 1 on. Two underscores in the name of a metric stand for a slash."""
    found: list[dict[str, Any]] = []
    for place, reward in enumerate(rewards):
        more = {name.replace("__", "/"): values[place] for name, values in figures.items()}
        record = {"phase": "rl", "step": place + 1, "reward/mean": reward, **more}
        found.append({key: value for key, value in record.items() if value is not None})
    return found


def find_collapse(found: Sequence[dict[str, Any]]) -> Alarm | None:
    """The first alarm in the records of a run's steps."""
    watch = CollapseWatch()
    alarms = (watch.add(record["step"], record) for record in found)
    return next((alarm for alarm in alarms if alarm is not None), None)


def alarm_step(found: Sequence[dict[str, Any]]) -> int | None:
    alarm = find_collapse(found)
    return None if alarm is None else alarm.step


def falls_in_hindsight(rewards: Sequence[float]) -> int:
    """The first step at which the mean of a window is lower than the best earlier window by the
    share FALL."""
    means = [sum(rewards[end - WINDOW : end]) / WINDOW for end in range(WINDOW, len(rewards) + 1)]
    fallen = (i for i, mean in enumerate(means) if mean < (1 - FALL) * max(means[: i + 1]))
    return next(fallen) + WINDOW


def best_window(rewards: Sequence[float]) -> int:
    """The last step of the window with the highest mean."""
    ends = range(WINDOW, len(rewards) + 1)
    return max(ends, key=lambda end: sum(rewards[end - WINDOW : end]))


def test_rates_on_the_kept_runs() -> None:
    """docs/campaigns.md quotes these numbers."""
    runs = [json.loads(line) for line in KEPT.read_text().splitlines()]
    found, delays, after_best = Counter[tuple[str, bool]](), list[int](), list[int]()
    for run in runs:
        step = alarm_step(records(run["rewards"]))
        found[run["outcome"], step is not None] += 1
        if run["outcome"] == "collapsed" and step is not None:
            delays.append(step - falls_in_hindsight(run["rewards"]))
            after_best.append(step - best_window(run["rewards"]))
    assert found == {
        ("converged", False): 194,
        ("collapsed", True): 18,
        ("stuck", False): 64,
        ("stuck", True): 17,
    }
    assert (min(delays), max(delays), delays.count(0)) == (-2, 5, 12)
    slow = sorted(delay for delay in after_best if delay > 10)
    assert len(slow) == 6 and (slow[0], slow[-1]) == (12, 21)
    page = (ROOT / "docs/campaigns.md").read_text()
    for row in (
        "| converged | 194 | 0 | 0% (0 to 1.9%) |",
        "| collapsed | 18 | 18 | 100% (81% to 100%) |",
        "| stuck | 81 | 17 | 21% (13% to 31%) |",
    ):
        assert row in page


@pytest.mark.slow
@pytest.mark.parametrize(
    ("window", "fall", "clear", "early", "stuck", "noise"),
    [
        (5, 0.25, 2.0, 12, 17, 5),
        (4, 0.175, 2.0, 14, 21, 5),
        (4, 0.175, 1.5, 16, 27, 16),
        (4, 0.175, 1.0, 17, 28, 37),
    ],
)
def test_faster_rules_take_noise_for_a_collapse(
    monkeypatch: pytest.MonkeyPatch,
    window: int,
    fall: float,
    clear: float,
    early: int,
    stuck: int,
    noise: int,
) -> None:
    """docs/campaigns.md has this table. It shows why no faster rule is used."""
    for name, value in (("WINDOW", window), ("FALL", fall), ("CLEAR", clear)):
        monkeypatch.setattr(collapse, name, value)
    runs = [json.loads(line) for line in KEPT.read_text().splitlines()]
    found, in_time = Counter[str](), 0
    for run in runs:
        step = alarm_step(records(run["rewards"]))
        found[run["outcome"]] += step is not None
        if run["outcome"] == "collapsed" and step is not None:
            in_time += step - best_window(run["rewards"]) <= 10
    assert (found["converged"], found["stuck"], in_time) == (0, stuck, early)
    draw = Random(1)
    healthy = ([0.5 + 0.15 * draw.gauss(0, 1) for _ in range(250)] for _ in range(100))
    assert sum(alarm_step(records(rewards)) is not None for rewards in healthy) == noise
    rule = f"{window}, {fall * 100:g}%, {clear:g}{' (the rule)' * (window == 5)}"
    assert f"| {rule} | {early} | {stuck} | {noise}%, " in (ROOT / "docs/campaigns.md").read_text()


@pytest.mark.parametrize("seed", ["1", "2"])
def test_whole_runs_of_the_demo_are_quiet(seed: str) -> None:
    """These runs have all metrics and 250 steps, and cause no alarm."""
    with Path(__file__).with_name("demo.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row.pop("seed") == seed]
    steps = [{key: float(value) for key, value in row.items()} for row in rows]
    assert len(steps) == 250 and {"policy/entropy", "grad_norm"} <= steps[0].keys()
    assert find_collapse([{"phase": "rl", **step} for step in steps]) is None


def test_a_fall_of_a_quarter_is_an_alarm_and_a_smaller_one_is_not() -> None:
    """At 72% of the best reward, five steps are a collapse. At 80% they are not."""
    assert alarm_step(records([*GOOD, *[0.36] * 9])) == len(GOOD) + 5
    assert alarm_step(records([*GOOD, *[0.4] * 9])) is None


@pytest.mark.parametrize(
    ("key", "good", "bad"),
    [
        ("policy__entropy", 0.5, 1.2),
        ("policy__entropy", 0.5, 0.1),
        ("grad_norm", 1.0, 5.0),
        ("ratio__token__max", 3.0, 40.0),
        ("mismatch__k3", 1e-4, 2e-3),
        ("response__length_mean", 100.0, 250.0),
        ("response__length_mean", 100.0, 40.0),
        ("response__truncated", 0.0, 0.3),
    ],
)
def test_half_of_it_is_one_with_another_figure_out_of_its_range(
    key: str, good: float, bad: float
) -> None:
    rewards: list[float | None] = [*GOOD, *[0.4] * 9]
    figures = {key: [good] * len(GOOD) + [bad] * 9}
    alarm = find_collapse(records(rewards, **figures))
    # the text names changes of steps, reward and metric
    assert alarm is not None and alarm.text.count("->") == 2
    # Even with a bad metric, a small fall of the reward is no collapse.
    assert find_collapse(records([*GOOD, *[0.5] * 9], **figures)) is None
    assert find_collapse(records([*GOOD, *[0.46] * 9], **figures)) is None


@pytest.mark.parametrize(
    ("key", "good", "bad"),
    [("ratio__token__max", 1.1, 15.0), ("mismatch__k3", 1e-7, 1e-4)],
)
def test_small_figures_may_grow_by_any_factor(key: str, good: float, bad: float) -> None:
    figures = {key: [good] * len(GOOD) + [bad] * 9}
    assert find_collapse(records([*GOOD, *[0.4] * 9], **figures)) is None


@pytest.mark.parametrize("key", ["reward/mean", "grad_norm", "loss"])
@pytest.mark.parametrize("value", [None, math.nan, math.inf])
def test_figures_that_are_not_finite_are_an_alarm_at_once(key: str, value: float | None) -> None:
    """In JSON, such a value is null."""
    watch = CollapseWatch()
    assert watch.add(1, {"reward/mean": 0.5, "grad_norm": 1.0, "loss": 0.0}) is None
    alarm = watch.add(2, {"reward/mean": 0.5, "grad_norm": 1.0, "loss": 0.0, key: value})
    assert alarm is not None and alarm.text == f"{key} is not finite"


@pytest.mark.parametrize("offset", [0.0, -1.0, -20.0, 100.0])
def test_noise_is_no_fall_whatever_rewards_are_measured_from(offset: float) -> None:
    """Rewards may be zero, negative or large, so a relative fall has no meaning. A fall is compared
    with the noise of the rewards."""
    wave = [offset + 0.3 * math.sin(2.3 * step) * math.cos(0.7 * step) for step in range(200)]
    assert alarm_step(records(wave)) is None


def test_a_fall_of_negative_rewards_is_one() -> None:
    rewards = [-1.0, -1.05, -0.95, -1.0] * 4 + [-1.6] * 8
    assert alarm_step(records(rewards)) is not None


def test_there_is_one_alarm_until_the_run_is_healthy_again() -> None:
    watch = CollapseWatch()
    good, bad = [0.5] * 12, [0.1] * 12
    alarms = [watch.add(r["step"], r) for r in records([*good, *bad, *good, *bad])]
    steps = [alarm.step for alarm in alarms if alarm is not None]
    assert len(steps) == 2 and 12 < steps[0] <= 17 and 36 < steps[1] <= 41


def test_the_healthy_step_has_a_healthy_window_behind_it() -> None:
    alarm = find_collapse(records([*GOOD, *[0.1] * 9]))
    assert alarm is not None and 0 < alarm.healthy <= len(GOOD) - WINDOW + 1


def test_a_watch_that_is_saved_goes_on_as_it_was() -> None:
    """The state is written to JSON and read again at every step."""
    found = records([*GOOD, *[0.1] * 9, *GOOD], grad_norm=[1.0 / 3] * 41)
    whole, resumed = CollapseWatch(), CollapseWatch()
    for record in found:
        resumed = CollapseWatch(**json.loads(json.dumps(resumed.state())))
        assert whole.add(record["step"], record) == resumed.add(record["step"], record)
        assert whole.state() == resumed.state()


def test_what_it_remembers_does_not_grow() -> None:
    watch, sizes = CollapseWatch(), list[int]()
    for record in records([0.5] * 200):
        watch.add(record["step"], record)
        sizes.append(len(watch.state()["recent"]))
    assert max(sizes) == 20 and all(b - a in (0, 1) for a, b in pairwise(sizes))


def test_other_rewards_begin_again_and_what_was_healthy_stays() -> None:
    """A new phase has harder prompts. Their lower rewards are no collapse, but a later fall is."""
    watch = CollapseWatch()
    harder = [0.2] * 12
    alarms = [watch.add(r["step"], r) for r in records([*GOOD])]
    healthy = watch.healthy_step
    watch.forget_rewards()
    assert watch.healthy_step == healthy == len(GOOD) - WINDOW
    found = records([*GOOD, *harder, *[0.05] * 6])[len(GOOD) :]
    alarms += [watch.add(r["step"], r) for r in found]
    steps = [alarm.step for alarm in alarms if alarm is not None]
    assert len(steps) == 1 and steps[0] > len(GOOD) + len(harder)
