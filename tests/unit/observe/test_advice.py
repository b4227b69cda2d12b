"""The warnings that metric records give about a run."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from gspo_megatron.observe.advice import Finding, advise, write_steps

DEMO = Path(__file__).with_name("demo.csv")
CONFIG: dict[str, dict[str, Any]] = {
    "rollout": {"max_response_tokens": 100},
    "objective": {"name": "gspo"},
}


def records(metrics: Mapping[str, Sequence[float | None]]) -> list[dict[str, Any]]:
    """Records of steps from 1 on, with these values for each metric."""
    columns = zip(*metrics.values(), strict=True)
    return [
        {"step": step, **dict(zip(metrics, values, strict=True))}
        for step, values in enumerate(columns, 1)
    ]


def only(found: Sequence[Finding], metric: str) -> tuple[int, ...]:
    """Check that there is one finding, about this metric. Returns its steps."""
    assert [finding.metric for finding in found] == [metric]
    assert found[0].text and found[0].advice.endswith(".")
    return found[0].steps


def healthy(seed: int) -> list[dict[str, Any]]:
    """A recorded RL run of the demo on one rank. The share of right answers rises from 48% to 100%
    with seed 1, and from 27% to 67% with seed 2."""
    with DEMO.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if int(row.pop("seed")) == seed]
    return [
        {"step": int(row.pop("step")), **{key: float(value) for key, value in row.items()}}
        for row in rows
    ]


@pytest.mark.parametrize("seed", [1, 2])
def test_a_healthy_run_gives_no_warning(seed: int) -> None:
    """At the end of the run with seed 1, nearly all groups are right. Most groups have no spread,
    and the entropy is 2% of its start. A step with one wrong answer has a 100 times larger gradient
    norm than a step without wrong answers."""
    config = {
        "rollout": {"max_response_tokens": 5},
        "objective": {"name": "gspo", "clip_low": 0.04, "clip_high": 0.04},
    }
    assert len(healthy(seed)) == 250
    assert advise(healthy(seed), config) == []


def test_an_alarm_of_the_watch_is_a_warning() -> None:
    found = advise([*healthy(1), {"step": 251, "reward/mean": 0.9, "collapse/alarm": 1.0}])
    assert only(found, "collapse/alarm") == (251,)
    assert "--from-step" in found[0].advice


def test_a_run_without_metrics_gives_no_warning() -> None:
    assert advise([]) == advise([{"step": 1, "reward/mean": None}]) == []


def test_the_same_curves_without_a_reward_are_a_collapse() -> None:
    """The rules notice the entropy and the groups of this run. The healthy run would get these
    warnings, too, if its reward were not high."""
    poor = [record | {"reward/mean": 0.3} for record in healthy(1)]
    assert {finding.metric for finding in advise(poor)} == {
        "policy/entropy",
        "reward/zero_spread_groups",
    }
    # The reward is compared with evaluation.correct_at, from which a response counts as correct.
    assert advise(poor, {"evaluation": {"correct_at": 0.3}}) == []


def test_gradient_spikes() -> None:
    norms = [1.5] * 10 + [87.0] + [1.4] * 10 + [16.0, 14.0, None, 577.0]
    found = advise(records({"grad_norm": norms}))
    assert only(found, "grad_norm") == (11, 22, 25)
    said = str(found[0])
    assert said.startswith("grad_norm, steps 11, 22, 25: gradient spikes, up to 577, over 10 times")
    early, growing = [1.0] * 4 + [50.0], [2.0 * 1.1**n for n in range(60)]
    # a spike in the first steps, when no usual size is known; and slow growth
    for norms in (early, growing):
        assert advise(records({"grad_norm": norms})) == []


def test_steps_without_any_gradient_are_no_measure_of_it() -> None:
    """With a sparse reward, most steps have no group with a spread, and so nearly no gradient."""
    norms, equal = [2.0] * 5 + [0.002] * 30 + [2.0], [0.5] * 5 + [1.0] * 30 + [0.9]
    values = {"grad_norm": norms, "reward/zero_spread_groups": equal, "reward/mean": [1.0] * 36}
    assert advise(records(values)) == []


def test_entropy_collapse() -> None:
    entropy = [1.0] * 10 + [0.05] * 10
    found = advise(records({"policy/entropy": entropy, "reward/mean": [0.4] * 20}))
    assert only(found, "policy/entropy") == (15, 16, 17, 18, 19, 20)
    assert "from 1.00 to 0.0500 nats per token" in found[0].text
    solved = {"policy/entropy": entropy, "reward/mean": [0.95] * 20}
    assert advise(records(solved)) == []
    assert advise(records({"policy/entropy": [1.0] * 10 + [0.2] * 10})) == []


@pytest.mark.parametrize(
    ("metric", "values", "steps"),
    [
        ("response/length_mean", [20.0] * 10 + [90.0] * 6, (15, 16)),
        # The responses are long from the start.
        ("response/length_mean", [70.0] * 10 + [90.0] * 6, None),
        # The responses grow, but are far from the limit.
        ("response/length_mean", [20.0] * 10 + [60.0] * 6, None),
        ("response/truncated", [0.0] * 10 + [0.3] * 6, (15, 16)),
        ("response/truncated", [0.2] * 10 + [0.3] * 6, None),
    ],
)
def test_length_explosion(metric: str, values: list[float], steps: tuple[int, ...] | None) -> None:
    found = advise(records({metric: values}), CONFIG)
    if steps is None:
        assert found == []
    else:
        assert only(found, metric) == steps
        assert "max_response_tokens" in found[0].advice


def test_a_length_is_compared_with_the_limit_of_its_phase() -> None:
    lengths = records({"response/length_mean": [20.0] * 10 + [90.0] * 6 + [195.0] * 6})
    phases = {1: CONFIG, 11: {"rollout": {"max_response_tokens": 200}}}
    [found] = advise(lengths, CONFIG, changed=phases)
    assert found.steps == (20, 21, 22)
    assert "195 then tokens, with 200 allowed" in found.text
    # A window in which the limit falls may still have the longer responses.
    lengths = records({"response/length_mean": [20.0] * 8 + [150.0] * 5 + [60.0] * 6})
    assert advise(lengths, phases[11], changed={14: CONFIG}) == []


def test_a_mismatch_is_compared_with_the_clip_range_of_its_phase() -> None:
    noise = records({"ratio/noise_floor": [1e-3] * 6})
    clips = ({"name": "gspo", "clip_low": clip, "clip_high": clip} for clip in (0.04, 1e-4))
    wide, narrow = ({"objective": clip} for clip in clips)
    [found] = advise(noise, wide, changed={1: wide, 4: narrow})
    assert found.steps == (4, 5, 6) and "more than the clip range 0.0001" in found.text


def test_what_counts_as_solved_may_change_with_the_phase() -> None:
    poor = [record | {"reward/mean": 0.3} for record in healthy(1)]
    harder = {250: {"evaluation": {"correct_at": 1.0}}}
    found = advise(poor, {"evaluation": {"correct_at": 0.3}}, changed=harder)
    assert only(found, "policy/entropy") == (250,)


@pytest.mark.parametrize(
    ("metric", "values", "warned"),
    [
        ("response/repeated", [0.05] * 10 + [0.3] * 10, True),
        # Normal texts repeat words, too, for example in lists.
        ("response/repeated", [0.04] * 10 + [0.09] * 10, False),
        # The responses have repeated words from the start.
        ("response/repeated", [0.3] * 20, False),
        ("response/length_mean", [20.0] * 10 + [40.0] * 10, True),
        ("response/length_mean", [20.0] * 10 + [28.0] * 10, False),
    ],
)
def test_a_reward_model_that_is_gamed(metric: str, values: list[float], warned: bool) -> None:
    score = [step / 10 for step in range(20)]
    curves = {"reward/mean": score, "reward_model/mean": score, metric: values}
    found = advise(records(curves), CONFIG)
    if warned:
        steps = only(found, metric)
        assert (
            steps[-1] == 20 and steps[0] > 10 and "the reward model's score rises" in found[0].text
        )
    else:
        assert found == []
    # No warning is given if the reward model's score falls while responses get longer or repeat.
    assert not advise(records(curves | {"reward_model/mean": score[::-1]}), CONFIG)
    del curves["reward_model/mean"]
    assert not advise(records(curves), CONFIG)


def test_groups_with_equal_rewards_for_many_steps() -> None:
    shares = [0.3] * 5 + [0.8] * 9 + [0.3] + [0.9] * 12
    values = {"reward/zero_spread_groups": shares}
    [metric] = values
    assert only(advise(records(values)), metric) == tuple(range(16, 28))
    assert advise(records({**values, "reward/mean": [0.95] * 27})) == []  # the problem is solved


@pytest.mark.parametrize(
    ("objective", "metric", "value", "warns"),
    [
        ({"name": "gspo"}, "ratio/noise_floor", 1e-3, True),
        ({"name": "gspo"}, "ratio/noise_floor", 2e-4, False),
        ({"name": "gspo", "clip_low": 0.04, "clip_high": 0.04}, "ratio/noise_floor", 1e-3, False),
        # the clip range of GRPO is for token ratios
        ({"name": "grpo"}, "ratio/noise_floor", 1e-3, False),
        ({"name": "grpo"}, "mismatch/abs_mean", 0.3, True),
        ({"name": "grpo"}, "mismatch/abs_mean", 0.1, False),
        ({"name": "sapo"}, "mismatch/abs_mean", 0.3, False),  # SAPO has no clip range
        ({"import_path": "a.b:c"}, "ratio/noise_floor", 1.0, False),
        ({"name": "of another version"}, "ratio/noise_floor", 1.0, False),
        ({}, "ratio/noise_floor", 1.0, False),
    ],
)
def test_a_mismatch_above_the_clip_range(
    objective: Mapping[str, Any], metric: str, value: float, warns: bool
) -> None:
    found = advise(records({metric: [value] * 3}), {"objective": objective})
    assert bool(found) == warns
    if warns:
        assert only(found, metric) == (1, 2, 3)
        assert "objective.correction" in found[0].advice
        from_rollout = {**objective, "old_logprobs": "rollout"}
        found = advise(records({metric: [value] * 3}), {"objective": from_rollout})
        assert "old_logprobs = recompute" in found[0].advice
    stale = {metric: [value] * 3, "staleness/max": [1.0] * 3}
    assert advise(records(stale), {"objective": objective}) == []
    outlier = advise(records({metric: [0.0] * 20 + [value]}), {"objective": objective})
    assert outlier == []


def test_rewards_that_failed() -> None:
    found = advise(records({"reward/errors": [0, 3, 1, 0], "reward/timeouts": [0, 0, 0, 0]}))
    assert only(found, "reward/errors") == (2, 3)
    assert found[0].text == "rewards failed, up to 3 in a step"


def test_rewards_that_are_slow() -> None:
    times = {"perf/reward_seconds": [1.0] * 5 + [6.0] * 5, "perf/step_seconds": [10.0] * 10}
    found = advise(records(times))
    assert only(found, "perf/reward_seconds") == (9, 10)
    assert found[0].text == "rewards are slow, up to 60.0% of the steps' time"
    waits, works = [0.8] * 10, [0.2] * 10
    for trainer, servers in ((waits, waits), (waits, works), (works, waits)):
        idle = {"perf/trainer_idle_share": trainer, "perf/engines_idle_share": servers}
        assert bool(advise(records(times | idle))) == (trainer == servers)


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        ([7], "step 7"),
        ([1, 2, 3, 9], "steps 1 to 3, 9"),
        ([1, 3, 5, 7, 9, 11, 12, 20], "steps 1, 3, 5, 7, 9 and 3 more"),
    ],
)
def test_steps_are_written_as_ranges(steps: list[int], text: str) -> None:
    assert write_steps(steps) == text


@pytest.mark.parametrize(("low", "high"), [(1e-4, 1e-2), (1e-2, 1e-4)])
def test_the_narrower_side_of_a_clip_range_counts(low: float, high: float) -> None:
    """The ratio is clipped at the narrower side, however wide the other side is."""
    objective = {"name": "gspo", "clip_low": low, "clip_high": high}
    found = advise(records({"ratio/noise_floor": [1e-3] * 3}), {"objective": objective})
    assert only(found, "ratio/noise_floor") == (1, 2, 3)
    assert "more than the clip range 0.0001" in found[0].text
    below = {"ratio/noise_floor": [1e-5] * 3}
    assert advise(records(below), {"objective": objective}) == []
