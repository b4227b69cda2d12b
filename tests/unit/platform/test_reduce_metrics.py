"""The metrics of a step, compared with direct formulas."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gspo_megatron.platform.reduce_metrics import (
    QUANTILES,
    StepMetrics,
    from_last_stage,
    mismatch_metrics,
)

pytestmark = pytest.mark.usefixtures("one_rank")

CPU = torch.device("cpu")


def reduced(
    *, means: Sequence = (), values: Sequence = (), maxima: Sequence = ()
) -> dict[str, float]:
    """The metrics of a step that collects these means, values and maxima."""
    metrics = StepMetrics(torch.device("cpu"))
    for each in means:
        metrics.add_means(each)
    for each in values:
        metrics.add_values(each)
    for name, value in maxima:
        metrics.add_maximum(name, torch.tensor(value))
    return metrics.reduce(dist.group.WORLD)


def normal(size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_means_add_numerators_and_denominators_over_micro_batches() -> None:
    values = [normal(5, 1), normal(1, 2), normal(9, 3)]
    pairs = [torch.tensor([float(part.sum()), len(part)]) for part in values]
    other = torch.tensor([2.0, 4.0])
    metrics = reduced(means=[{"loss": pair, "other": other} for pair in pairs])
    assert metrics["loss"] == pytest.approx(float(torch.cat(values).mean()), abs=1e-6)
    assert metrics["other"] == 0.5
    assert set(metrics) == {"loss", "other"}


def test_small_contributions_are_not_lost_beside_large_ones() -> None:
    # Each small value is lost if it is added to the large one in fp32.
    pairs = [torch.tensor([2.0**25, 1.0])] + [torch.tensor([1.0, 0.0])] * 8
    assert reduced(means=[{"x": pair} for pair in pairs])["x"] == 2.0**25 + 8


def test_of_nothing_a_mean_is_nan_and_there_are_no_quantiles() -> None:
    empty = {"ratio/token": torch.zeros(0), "ratio/sequence": torch.zeros(0)}
    metrics = reduced(means=[{"loss": torch.zeros(2)}], values=[empty])
    assert set(metrics) == {"loss"} and math.isnan(metrics["loss"])
    assert reduced() == {}


def test_the_largest_is_kept() -> None:
    maxima = [("mismatch/max", value) for value in (-3.0, 2.5, 1.0)]
    assert reduced(maxima=maxima) == {"mismatch/max": 2.5}


@pytest.mark.parametrize("count", [1, 2, 101, 3000])
def test_quantiles_of_sequences_are_exact(count: int) -> None:
    values = (0.01 * normal(count)).exp().float()
    nothing = torch.full((2,), math.nan)  # responses that do not count
    metrics = reduced(values=[{"ratio/sequence": part} for part in (nothing, *values.split(7))])
    shares = torch.tensor([0.0, 0.01, 0.5, 0.99, 1.0], dtype=torch.float64)
    expected = pytest.approx(values.double().quantile(shares).tolist(), rel=1e-12)
    assert [metrics[f"ratio/sequence/{label}"] for label in QUANTILES] == expected


# A decade has 64 bins, so a bin covers a factor of 10^(1/64). A value differs from the middle of
# its bin by at most the square root of this factor.
HALF_BIN = 10.0 ** (0.5 / 64) * (1 + 1e-9)
SMALLEST = 1e-9  # a smaller difference counts as a ratio of 1


def quantile_of_logs(logs: Tensor, share: float) -> float:
    """The smallest of `logs` that at least `share` of all logarithms do not exceed."""
    ordered = logs.sort().values
    return float(ordered[max(math.ceil(share * len(ordered)) - 1, 0)])


@pytest.mark.parametrize("spread", [1e-8, 1e-4, 0.02, 0.5, 5.0])
@pytest.mark.parametrize("count", [1, 2, 99, 5000])
@pytest.mark.parametrize("shift", [-1.5, 0.0, 2.0])
def test_quantiles_of_tokens_are_within_half_a_bin(spread: float, count: int, shift: float) -> None:
    logs = spread * (normal(count, seed=count) + shift)
    parts = logs.exp().split(1 + count // 3)
    metrics = reduced(values=[{"ratio/token": part} for part in parts])
    logs = logs.exp().log()  # near 1, a ratio cannot represent logarithms below 1e-16
    for label, share in QUANTILES.items():
        expected = quantile_of_logs(logs, share)
        got = math.log(metrics[f"ratio/token/{label}"])
        if label in ("min", "max"):
            assert got == pytest.approx(expected, rel=1e-12, abs=1e-15)
        elif abs(expected) < SMALLEST:
            assert abs(got) < SMALLEST
        else:
            assert math.copysign(1.0, got) == math.copysign(1.0, expected)
            assert 1 / HALF_BIN <= abs(got / expected) <= HALF_BIN


def test_ratios_of_exactly_one_and_beyond_the_bins() -> None:
    ratios = [1.0] * 98 + [1.0 + 1e-12, math.exp(60.0)]
    metrics = reduced(values=[{"ratio/token": torch.tensor(ratios, dtype=torch.float64)}])
    assert [metrics[f"ratio/token/{label}"] for label in ("min", "p01", "p50")] == [1.0] * 3
    assert metrics["ratio/token/p99"] == pytest.approx(1.0, abs=1e-9)
    assert metrics["ratio/token/max"] == pytest.approx(math.exp(60.0))


def test_a_ratio_that_underflowed_to_zero_is_the_minimum() -> None:
    metrics = reduced(values=[{"ratio/token": torch.tensor([1.0, 0.0, 2.0])}])
    assert metrics["ratio/token/min"] == 0.0
    assert metrics["ratio/token/max"] == pytest.approx(2.0)


@pytest.mark.parametrize("seed", range(3))
def test_mismatch_against_its_formulas(seed: int) -> None:
    trained = -normal(40, seed).abs().float()
    rollout = trained + 0.8 * normal(40, seed + 10).float()
    mask = (normal(40, seed + 20) > -0.5).float()
    means, largest = mismatch_metrics(trained, rollout, mask)
    differences = [float(t) - float(s) for t, s, m in zip(trained, rollout, mask, strict=True) if m]
    formulas = {
        "mismatch/abs_mean": [abs(d) for d in differences],
        "mismatch/k1": [-d for d in differences],
        "mismatch/k3": [math.exp(d) - 1.0 - d for d in differences],
        "mismatch/over_ln2": [float(abs(d) > math.log(2.0)) for d in differences],
    }
    assert means.keys() == formulas.keys()
    for name, values in formulas.items():
        assert means[name].tolist() == pytest.approx([sum(values), len(values)], rel=1e-6), name
    assert float(largest) == pytest.approx(max(abs(d) for d in differences))
    assert 0 < means["mismatch/over_ln2"][0] < len(differences)


def test_mismatch_of_nothing_and_of_a_huge_difference() -> None:
    means, largest = mismatch_metrics(torch.zeros(3), torch.ones(3), torch.zeros(3))
    assert all(pair.tolist() == [0.0, 0.0] for pair in means.values()) and float(largest) == 0.0
    means, largest = mismatch_metrics(torch.zeros(1), torch.full((1,), -1e4), torch.ones(1))
    assert math.isfinite(means["mismatch/k3"][0]) and float(largest) == 1e4


def test_k3_keeps_its_digits_near_zero() -> None:
    difference = 1e-7
    trained = torch.tensor([-1.0], dtype=torch.float64)
    means, _ = mismatch_metrics(trained, trained - difference, torch.ones(1))
    # For small d, e^d - 1 - d is d^2 / 2. The subtraction leaves about two digits of a float64.
    assert float(means["mismatch/k3"][0]) == pytest.approx(difference**2 / 2, rel=0.05)


def test_a_single_stage_keeps_its_metrics() -> None:
    metrics = {"loss": 1.0}
    assert from_last_stage(lambda: metrics) is metrics
