"""The simulation of a rollout plan, compared with formulas and with a second, simple simulation."""

from __future__ import annotations

import math
import time
from fractions import Fraction

import numpy as np
import pytest

from gspo_megatron.estimate.rollout_plan import (
    STEPS,
    ServerSpeed,
    Setting,
    StepFigures,
    best,
    log_normal_lengths,
    outcome,
    simulate,
    steps_of,
)


def constant(length: float, responses: int, draws: int = STEPS + 4) -> np.ndarray:
    return np.full((draws, responses), float(length))


# --- formulas -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("slots", "speed", "rollout"),
    [
        (8, 1000.0, 100 / 10),  # each server has 8 responses of 100 tokens, at 10 tokens/s each
        (8, 40.0, 100 / 5),  # 8 responses share 40 tokens/s
        (4, 1000.0, 2 * 100 / 10),  # two rounds of 4 responses
    ],
)
def test_without_staleness_a_step_is_the_sum_of_its_parts(
    slots: int, speed: float, rollout: float
) -> None:
    found = outcome(constant(100, 16), ServerSpeed(10, speed, slots), Setting(2, 0, 7, 3))
    step = rollout + 7 + 3
    assert found.step_seconds == pytest.approx(step)
    assert found.trainer_idle == pytest.approx(rollout / step)
    assert found.servers_load == pytest.approx(1600 / step / (2 * min(speed, slots * 10)))
    assert found.staleness_mean == found.staleness_max == 0


@pytest.mark.parametrize("max_staleness", [1, 2, 4])
@pytest.mark.parametrize("train", [4.0, 20.0])
def test_with_staleness_a_step_is_the_slower_side_and_the_update(
    train: float, max_staleness: int
) -> None:
    """All responses of a request run at the same time, so the rollout of the request takes 10 s."""
    found = outcome(
        constant(100, 16), ServerSpeed(10, 1000, 8), Setting(2, max_staleness, train, 3)
    )
    assert found.step_seconds == pytest.approx(max(10, train) + 3)
    wait = max(10 - train, 0)
    assert found.trainer_idle == pytest.approx(wait / (max(10, train) + 3), abs=1e-12)
    assert 0 < found.staleness_mean <= found.staleness_max <= max_staleness


@pytest.mark.parametrize("max_staleness", range(5))
def test_a_long_response_has_so_many_steps_as_the_bound_allows(max_staleness: int) -> None:
    """Request t starts with version t - 1 - max_staleness, and its training ends max_staleness + 1
    steps later. This time contains the longest response of the request, the training on the
    request, and max_staleness updates."""
    lengths = constant(10, 8)
    lengths[:, 3] = 1200
    found = outcome(lengths, ServerSpeed(10, 1e6, 1000), Setting(1, max_staleness, 30, 2))
    steps = max_staleness + 1
    assert found.step_seconds == pytest.approx(max(30, (1200 / 10 + 30) / steps) + 2)


# --- a second simulation --------------------------------------------------------------------------


def naive(
    lengths: np.ndarray, server: ServerSpeed, setting: Setting, steps: int
) -> tuple[list[tuple[float, float, float]], np.ndarray]:
    """Simulate without shortcuts. Returns the times (batch complete, trained, new version) of each
    step, and tokens [version, request].

    The simulation computes in exact fractions, from one event to the next. Every response has its
    own count of missing tokens, and the trainer's state is checked at each event.
    """
    alone, full = 1 / Fraction(server.sequence_speed), server.slots / Fraction(server.speed)
    growth = (full - alone) / (server.slots - 1) if server.slots > 1 and full > alone else 0
    waiting = [(t, Fraction(int(n))) for t, row in enumerate(lengths, 1) for n in row]
    # for each server: [request, missing tokens] of each of its responses
    running: list[list[list]] = [[] for _ in range(setting.servers)]
    missing = dict.fromkeys(range(1, len(lengths) + 1), lengths.shape[1])
    tokens = np.zeros((steps, len(lengths)))
    now, version, state, left = Fraction(0), 0, "waits", None
    times: list[list[float]] = []
    while version < steps:
        while state != "updates" and waiting:
            fewest = min(running, key=len)
            if len(fewest) == server.slots or version < waiting[0][0] - 1 - setting.max_staleness:
                break
            fewest.append(list(waiting.pop(0)))
        if state == "waits" and missing[version + 1] == 0:
            state, left = "trains", Fraction(setting.train_seconds)
            times.append([float(now)])
        speeds = [1 / (alone + growth * max(len(r) - 1, 0)) for r in running]
        drawing = [] if state == "updates" else list(zip(running, speeds))
        moments = [response[1] / speed for r, speed in drawing for response in r]
        passed = min([*moments, left] if left is not None else moments)
        now += passed
        for responses, speed in drawing:
            for response in responses:
                response[1] -= passed * speed
                tokens[version, response[0] - 1] += passed * speed
                missing[response[0]] -= response[1] == 0
            responses[:] = [response for response in responses if response[1] > 0]
        if left is not None:
            left -= passed
            if left == 0 and state == "trains":
                state, left = "updates", Fraction(setting.update_seconds)
                times[-1].append(float(now))
            elif left == 0:
                state, left, version = "waits", None, version + 1
                times[-1].append(float(now))
    return [tuple(each) for each in times], tokens


@pytest.mark.parametrize("seed", range(40))
def test_it_agrees_with_a_naive_simulation_in_exact_fractions(seed: int) -> None:
    rng = np.random.default_rng(seed)
    bound, steps = int(rng.integers(0, 4)), 5
    lengths = rng.integers(1, 10**6, (steps + bound, int(rng.integers(1, 13))))
    server = ServerSpeed(
        float(rng.integers(1, 50)), float(rng.integers(50, 150)), int(rng.integers(1, 7))
    )
    typical = lengths.sum(1).mean() / server.speed
    train, update = (int(rng.integers(1, 2 + share * typical)) for share in (1.5, 0.2))
    setting = Setting(int(rng.integers(1, 4)), bound, train, update)
    expected, expected_tokens = naive(lengths, server, setting, steps)
    times, tokens = simulate(lengths, server, setting, steps)
    # The tolerance is for float64 sums of a hundred events.
    assert times == pytest.approx(np.array(expected), rel=1e-11)
    assert tokens == pytest.approx(expected_tokens, abs=1e-4)


@pytest.mark.parametrize("max_staleness", range(4))
def test_no_token_is_lost_or_older_than_the_bound(max_staleness: int) -> None:
    rng = np.random.default_rng(max_staleness)
    lengths = np.ceil(rng.lognormal(5, 1.2, (STEPS + max_staleness, 96)))
    setting = Setting(3, max_staleness, 60, 5)
    times, tokens = simulate(lengths, ServerSpeed(30, 500, 24), setting, STEPS)
    drawn = tokens[:, :STEPS]
    assert drawn.sum(0) == pytest.approx(lengths[:STEPS].sum(1))
    versions, draws = np.nonzero(drawn > 1e-3)
    # Request t, counted from 1, is trained when the weights have version t - 1.
    staleness = draws - versions
    assert staleness.min() == 0 or max_staleness > 0
    assert staleness.max() == max_staleness
    # The servers generate at most this many tokens between updates.
    seconds = times[:, 1] - np.concatenate([[0], times[:-1, 2]])
    assert (tokens.sum(1) <= 3 * 500 * seconds * (1 + 1e-12)).all()
    assert outcome(lengths, ServerSpeed(30, 500, 24), setting).staleness_max == max_staleness


def test_many_servers_and_responses_take_seconds() -> None:
    lengths = np.ceil(np.random.default_rng(0).lognormal(7.6, 1, (STEPS + 1, 10_000)))
    began = time.process_time()
    outcome(lengths, ServerSpeed(60, 3000, 256), Setting(64, 1, 100, 10))
    assert time.process_time() - began < 15  # measured: 1.9 s


def test_the_best_is_the_least_stale_of_those_that_are_as_fast() -> None:
    def result(servers: int, bound: int, seconds: float) -> StepFigures:
        return StepFigures(Setting(servers, bound, 1, 1), seconds, 0, 1, bound, bound)

    slow, near, fast = result(4, 0, 130), result(8, 1, 101), result(8, 3, 100)
    assert best([slow, near, fast]) is near
    assert best([slow, fast]) is fast
    # `near` counts as equally fast, and has fewer servers.
    assert best([result(16, 1, 100), near, fast]) is near


def test_lengths_are_log_normal_and_cut() -> None:
    lengths = log_normal_lengths(1000, 3000, 10**9, (100, 1000))
    assert np.percentile(lengths, [50, 90]) == pytest.approx([1000, 3000], rel=0.03)
    sigma = math.log(3) / 1.2815515655446004  # 1.28… is the 90% quantile of the normal distribution
    assert lengths.mean() == pytest.approx(1000 * math.exp(sigma**2 / 2), rel=0.03)
    assert log_normal_lengths(1000, 3000, 2500, (100, 1000)).max() == 2500


@pytest.mark.parametrize("max_staleness", [0, 4, 6, 12])
def test_whole_bunches_of_steps_count(max_staleness: int) -> None:
    """Each bunch of max_staleness + 1 requests has one slow request. The place of this request in
    the bunch does not change the mean step, even if 60 is not a multiple of the bunch's size."""
    steps, first = steps_of(max_staleness)
    bunch = max_staleness + 1
    assert steps >= STEPS and first >= bunch and (steps - first) % bunch == 0
    means = []
    for slow in range(bunch):
        lengths = constant(10, 4, steps + max_staleness)
        lengths[slow::bunch] = 100
        # Training and updates take almost no time.
        setting = Setting(1, max_staleness, 1e-9, 1e-9)
        means.append(outcome(lengths, ServerSpeed(10, 40, 4), setting).step_seconds)
    assert means == pytest.approx([(100 + 10 * max_staleness) / 10 / bunch] * bunch, rel=1e-3)
