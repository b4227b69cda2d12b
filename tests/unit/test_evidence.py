"""examples/evidence: its estimators against gradients whose bias and noise are known by hand."""

from __future__ import annotations

import itertools
import math
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "evidence"))

import estimators
from estimators import Products, effective_share, quality, ratio_figures, with_intervals

# A policy of two tokens: pi(1) = sigmoid(theta). A response has LENGTH of them, independent; its
# reward is the share of ones. It was sampled at OLD and is trained at NEW.
LENGTH, OLD, NEW = 3, -0.3, 0.8


def chance(theta: float) -> float:
    return 1 / (1 + math.exp(-theta))


def everything(theta: float) -> list[tuple[float, int]]:
    """(probability, number of ones) of all responses."""
    p = chance(theta)
    ones = [sum(y) for y in itertools.product((0, 1), repeat=LENGTH)]
    return [(p**n * (1 - p) ** (LENGTH - n), n) for n in ones]


def gradient(ones: int, weight: str) -> float:
    """w (R - 1/2) d log pi / d theta of one response, at NEW, with its importance weight."""
    score = ones - LENGTH * chance(NEW)
    log_ratio = ones * math.log(chance(NEW) / chance(OLD))
    log_ratio += (LENGTH - ones) * math.log((1 - chance(NEW)) / (1 - chance(OLD)))
    weights = {
        "none": 1.0,
        "sequence": math.exp(log_ratio / LENGTH),
        "product": math.exp(log_ratio),
    }
    return weights[weight] * (ones / LENGTH - 0.5) * score


def moments(theta: float, weight: str) -> tuple[float, float]:
    """Mean and variance of `gradient` over responses of the policy `theta`, by enumeration."""
    mean = sum(p * gradient(n, weight) for p, n in everything(theta))
    square = sum(p * gradient(n, weight) ** 2 for p, n in everything(theta))
    return mean, square - mean**2


def drawn(theta: float, weight: str, batches: int, size: int, seed: int) -> np.ndarray:
    """[batches, 1] mean gradients of `size` responses each."""
    rng = np.random.default_rng(seed)
    ones = rng.binomial(LENGTH, chance(theta), (batches, size))
    table = np.array([gradient(n, weight) for n in range(LENGTH + 1)])
    return table[ones].mean(1, keepdims=True)


def products(own: np.ndarray, unbiased: np.ndarray, reference: np.ndarray) -> Products:
    difference = own - unbiased
    return Products(
        own @ own.T, difference @ difference.T, own @ reference.T, reference @ reference.T
    )


@pytest.mark.parametrize("weight", ["none", "sequence", "product"])
def test_bias_and_noise_are_those_computed_by_hand(weight: str) -> None:
    size, batches = 20, 4000
    found = quality(
        products(
            drawn(OLD, weight, batches, size, seed=1),
            drawn(OLD, "product", batches, size, seed=1),  # the same responses
            drawn(NEW, "none", batches, size, seed=2),
        )
    )
    (mean, variance), (true, _) = moments(OLD, weight), moments(NEW, "none")
    if weight == "product":  # the one that is unbiased
        assert mean == pytest.approx(true, rel=1e-12)
    # Standard errors: of a mean sqrt(variance / 80,000), of |R| the same.
    error = 4 * math.sqrt((variance + moments(NEW, "none")[1]) / (size * batches)) / true
    assert found["projection"] == pytest.approx(mean / true, abs=error)
    assert found["bias"] == pytest.approx(abs(mean - true) / true, abs=3 * error)
    assert found["noise"] == pytest.approx(variance / size / true**2, rel=0.1)
    assert found["signal"] == pytest.approx(mean**2 / (variance / size), rel=0.15)
    assert found["direction"] == pytest.approx(1.0, abs=0.02)  # one parameter, the same sign


def test_intervals_hold_the_truth_as_often_as_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimators, "RESAMPLES", 100)
    mean, variance = moments(OLD, "sequence")
    true, held = moments(NEW, "none")[0], {"projection": 0, "noise": 0, "bias": 0}
    expected = {
        "projection": mean / true,
        "noise": variance / 50 / true**2,
        "bias": abs(mean - true) / true,
    }
    for seed in range(100):
        own, unbiased = (
            drawn(OLD, weight, 24, 50, seed=2 * seed) for weight in ("sequence", "product")
        )
        reference = drawn(NEW, "none", 48, 50, seed=2 * seed + 1)
        found = with_intervals(products(own, unbiased, reference), seed)
        for name in held:
            value, low, high = found[name]
            assert low <= value <= high
            held[name] += low <= expected[name] <= high
    # 95 of 100 in the limit of many batches, 85 to 99 of 100 for 24 of them; the seeds are fixed
    assert all(80 <= count <= 100 for count in held.values()), held


def test_directions_in_many_dimensions() -> None:
    rng = np.random.default_rng(0)
    true, mean = np.array([1.0, 0, 0, 0, 0]), np.array([0.6, 0.8, 0, 0, 0])
    own = mean + rng.normal(0, 0.5, (3000, 5))
    reference = true + rng.normal(0, 0.5, (3000, 5))
    found = quality(products(own, true + own - mean, reference))  # the same noise as `own`
    assert found["projection"] == pytest.approx(0.6, abs=0.05)
    assert found["direction"] == pytest.approx(0.6, abs=0.05)
    assert found["bias"] == pytest.approx(math.sqrt(0.4**2 + 0.8**2), abs=0.03)
    assert found["noise"] == pytest.approx(5 * 0.25, rel=0.05)


def test_a_gradient_that_is_all_clipped_has_no_direction() -> None:
    rng = np.random.default_rng(0)
    nothing, whole = np.zeros((4, 3)), np.ones((4, 3))
    found = quality(products(nothing, whole, whole + 0.01 * rng.normal(size=(4, 3))))
    assert found["projection"] == 0 and found["cosine"] == 0 and found["noise"] == 0
    assert found["bias"] == pytest.approx(1.0, abs=0.05)
    assert math.isnan(found["direction"]) and math.isnan(found["signal"])


def test_log_ratios_follow_the_formula_of_correlated_terms() -> None:
    rng = np.random.default_rng(0)
    length, common, own = 16, 0.03, 0.1
    ratios = rng.normal(0, common, (20_000, 1)) + rng.normal(0, own, (20_000, length))
    found = ratio_figures(ratios)
    deviation = math.hypot(common, own)
    correlation = common**2 / deviation**2
    assert found["token_deviation"] == pytest.approx(deviation, rel=0.01)
    assert found["correlation"] == pytest.approx(correlation, rel=0.1)
    predicted = deviation * math.sqrt((1 + (length - 1) * correlation) / length)
    assert found["sequence_deviation"] == pytest.approx(predicted, rel=0.02)
    assert found["independent_deviation"] == pytest.approx(deviation / 4, rel=0.01)


def test_effective_sample_sizes() -> None:
    assert effective_share(np.log([1.0, 1.0, 1.0, 1.0])) == pytest.approx(1.0)
    assert effective_share(np.log([3.0, 1.0])) == pytest.approx(16 / 20)
    assert effective_share(np.array([1000.0, 0.0])) == pytest.approx(0.5)
