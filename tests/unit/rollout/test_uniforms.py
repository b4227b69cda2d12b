"""The random numbers behind sampling: SplitMix64 over (seed, sample, position)."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from gspo_megatron.rollout import sampling
from gspo_megatron.rollout.sampling import uniforms

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15


def splitmix64_finaliser(z: int) -> int:
    """Steele, Lea, Flood 2014, figure 16 with Stafford's mix 13, in unsigned integers."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def reference_bits(seed: int, sample: int, position: int) -> int:
    state = splitmix64_finaliser(seed * _GAMMA & _MASK)
    state = splitmix64_finaliser((state + sample * _GAMMA) & _MASK)
    return splitmix64_finaliser((state + (position + 1) * _GAMMA) & _MASK)


@pytest.mark.parametrize("seed", [0, 1, 7, (1 << 32) + 5, (123456 << 32) + 99_999])
def test_every_number_is_that_of_splitmix64(seed: int) -> None:
    samples = [0, 1, 2, 1000, 123_456_789, 1 << 40]
    values = uniforms(seed, torch.tensor(samples), 9)
    assert values.dtype == torch.float64 and values.shape == (len(samples), 9)
    for row, sample in zip(values.tolist(), samples, strict=True):
        for position, value in enumerate(row):
            # the number is known to 52 bits; how the last one is rounded is nobody's business
            expected = reference_bits(seed, sample, position) * 2.0**-64
            assert value == pytest.approx(expected, abs=2.0**-52, rel=0.0)


def test_a_sample_does_not_depend_on_its_batch_or_on_how_many_positions_are_wanted() -> None:
    samples = torch.arange(200)
    together = uniforms(3, samples, 32)
    chosen = torch.tensor([150, 3, 77, 3])
    assert torch.equal(uniforms(3, chosen, 32), together[chosen])
    assert torch.equal(uniforms(3, samples, 5), together[:, :5])
    assert uniforms(3, samples[:0], 4).shape == (0, 4)


def test_seeds_samples_and_positions_all_give_different_numbers() -> None:
    samples = torch.arange(500)
    values = torch.stack([uniforms(seed, samples, 24) for seed in (0, 1, 2, 1 << 32, 1 << 33)])
    # 60,000 of 2^52 numbers: two alike by chance once in a million such tests
    assert values.unique().numel() == values.numel()


def kolmogorov_smirnov(values: Tensor) -> float:
    """Largest distance between the empirical distribution and the uniform one, times sqrt(n)."""
    ordered = values.flatten().sort().values
    count = ordered.numel()
    steps = torch.arange(count + 1, dtype=torch.float64) / count
    distance = torch.maximum(steps[1:] - ordered, ordered - steps[:-1]).max()
    return float(distance) * math.sqrt(count)


CRITICAL = 1.95  # exceeded by uniform numbers with probability 0.001


@pytest.mark.parametrize("seed", [0, 1, 5, (1 << 32) + 1])
def test_the_distribution_is_uniform(seed: int) -> None:
    values = uniforms(seed, torch.arange(1000), 20)
    assert float(values.min()) > 0.0 and float(values.max()) < 1.0
    assert kolmogorov_smirnov(values) < CRITICAL
    for position in (0, 1, 19):  # across samples at one position, as a step draws them
        assert kolmogorov_smirnov(values[:, position]) < CRITICAL
    assert kolmogorov_smirnov(uniforms(seed, torch.tensor([17]), 5000)) < CRITICAL
    seeds = range(seed, seed + 2000)
    across_seeds = torch.stack([uniforms(s, torch.tensor([3]), 1) for s in seeds])
    assert kolmogorov_smirnov(across_seeds) < CRITICAL


def test_neighbours_are_not_correlated() -> None:
    values = torch.stack([uniforms(seed, torch.arange(100), 50) for seed in range(8)]) - 0.5
    pairs = {
        "position": (values[:, :, 1:], values[:, :, :-1]),
        "sample": (values[:, 1:], values[:, :-1]),
        "seed": (values[1:], values[:-1]),
        "diagonal": (values[:, 1:, :-1], values[:, :-1, 1:]),
    }
    for name, (left, right) in pairs.items():
        correlation = float((left * right).mean()) * 12.0  # variance of a uniform: 1/12
        assert abs(correlation) * math.sqrt(left.numel()) < 3.3, name  # probability 0.001


def test_the_largest_bits_stay_below_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "_finalise", lambda z: torch.full_like(z, -1))
    assert float(uniforms(1, torch.tensor([0]), 1)) < 1.0


def test_the_smallest_bits_stay_above_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "_finalise", torch.zeros_like)
    assert float(uniforms(1, torch.tensor([0]), 1)) > 0.0
