"""Group advantages against the statistics module and worked examples."""

from __future__ import annotations

import random
import statistics

import pytest
import torch

from gspo_megatron.objectives.advantages import group_mean, group_mean_std, zero_spread_groups


def test_sample_deviation_gives_the_popular_example():
    advantages = group_mean_std(torch.tensor([0.8, 0.4, 0.6]), torch.zeros(3, dtype=torch.long))
    # Rewards are float32: 0.8 - 0.6 is good to 1e-7.
    torch.testing.assert_close(advantages, torch.tensor([1.0, -1.0, 0.0]), rtol=0, atol=1e-6)


def test_population_deviation_gives_its_own_figure():
    advantages = group_mean_std(
        torch.tensor([0.8, 0.4, 0.6]), torch.zeros(3, dtype=torch.long), std="population"
    )
    root = 1.5**0.5
    torch.testing.assert_close(advantages, torch.tensor([root, -root, 0.0]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_groups_of_any_order_number_and_size_equal_the_statistics_module(seed):
    rng = random.Random(seed)
    numbers = [5, 0, 1000, -3]
    index = [number for number in numbers for _ in range(rng.randint(2, 6))]
    rng.shuffle(index)
    rewards = [rng.uniform(-2, 2) for _ in index]
    groups = {n: [r for r, i in zip(rewards, index, strict=True) if i == n] for n in numbers}
    pairs = list(zip(rewards, index, strict=True))
    expected = {
        "mean": [r - statistics.mean(groups[i]) for r, i in pairs],
        "sample": [
            (r - statistics.mean(groups[i])) / statistics.stdev(groups[i]) for r, i in pairs
        ],
        "population": [
            (r - statistics.mean(groups[i])) / statistics.pstdev(groups[i]) for r, i in pairs
        ],
    }
    tensors = torch.tensor(rewards, dtype=torch.float64), torch.tensor(index)
    actual = {
        "mean": group_mean(*tensors),
        "sample": group_mean_std(*tensors, std="sample"),
        "population": group_mean_std(*tensors, std="population"),
    }
    for key, values in expected.items():
        # The result is rounded to float32 once.
        assert actual[key].tolist() == pytest.approx(values, rel=1e-6, abs=1e-7), key


@pytest.mark.parametrize("reward", [0.0, 0.1, 1.0, -0.7, 1e6])
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_a_group_without_spread_has_advantages_of_exactly_zero(reward, size):
    # The mean of three times 0.1 is not 0.1: dividing what is left over by itself gives +-1.
    rewards = torch.tensor([reward] * size + [1.0, 0.0])
    index = torch.tensor([0] * size + [1, 1])
    for advantages in (
        group_mean_std(rewards, index),
        group_mean_std(rewards, index, std="population"),
        group_mean(rewards, index),
    ):
        assert (advantages[:size] == 0).all()
        assert (advantages[size:] != 0).all()
    assert zero_spread_groups(rewards, index).tolist() == [1, 2]


def test_rounding_is_not_a_spread():
    rewards = torch.tensor([0.1 + 0.2, 0.3, 0.30000001, 0.3])
    rewards[1] = torch.nextafter(rewards[1], torch.tensor(1.0))
    assert len(rewards.unique()) == 2
    index = torch.zeros(4, dtype=torch.long)
    assert (group_mean_std(rewards, index) == 0).all()


def test_small_but_real_spreads_are_not_damped():
    advantages = group_mean_std(
        torch.tensor([1.0, 1.0001], dtype=torch.float64), torch.zeros(2, dtype=torch.long)
    )
    root = 0.5**0.5
    torch.testing.assert_close(advantages, torch.tensor([-root, root]), rtol=1e-6, atol=0)


def test_columns_are_refused_instead_of_broadcast():
    with pytest.raises(AssertionError):
        group_mean(torch.ones(4, 1), torch.zeros(4, dtype=torch.long))
