"""Group advantages against the statistics module and worked examples."""

from __future__ import annotations

import random
import statistics
from functools import partial

import pytest
import torch

from gspo_megatron.config.schema import ObjectiveSection
from gspo_megatron.objectives.advantages import (
    batch_std,
    build_advantages,
    group_mean,
    group_mean_std,
    leave_one_out,
    zero_spread_groups,
)

ALL = {
    "mean": group_mean,
    "sample": group_mean_std,
    "population": partial(group_mean_std, std="population"),
    "batch": batch_std,
    "batch population": partial(batch_std, std="population"),
    "leave one out": leave_one_out,
}


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
        "batch": [(r - statistics.mean(groups[i])) / statistics.stdev(rewards) for r, i in pairs],
        "batch population": [
            (r - statistics.mean(groups[i])) / statistics.pstdev(rewards) for r, i in pairs
        ],
        "leave one out": [
            r - (sum(groups[i]) - r) / (len(groups[i]) - 1)  # the mean of the others
            for r, i in pairs
        ],
    }
    tensors = torch.tensor(rewards, dtype=torch.float64), torch.tensor(index)
    assert expected.keys() == ALL.keys()
    for key, values in expected.items():
        found = ALL[key](*tensors)
        assert found.dtype == torch.float32
        # The result is rounded to float32 once.
        assert found.tolist() == pytest.approx(values, rel=1e-7, abs=1e-7), key


@pytest.mark.parametrize("reward", [0.0, 0.1, 1.0, -0.7, 1e6])
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_a_group_without_spread_has_advantages_of_exactly_zero(reward, size):
    # The mean of three times 0.1 is not 0.1: dividing what is left over by itself gives +-1.
    rewards = torch.tensor([reward] * size + [1.0, 0.0])
    index = torch.tensor([0] * size + [1, 1])
    for key, function in ALL.items():
        advantages = function(rewards, index)
        assert (advantages[:size] == 0).all(), key
        assert (advantages[size:] != 0).all(), key
    assert zero_spread_groups(rewards, index).tolist() == [1, 2]


def test_rounding_is_not_a_spread():
    rewards = torch.tensor([0.1 + 0.2, 0.3, 0.30000001, 0.3])
    rewards[1] = torch.nextafter(rewards[1], torch.tensor(1.0))
    assert len(rewards.unique()) == 2
    index = torch.zeros(4, dtype=torch.long)
    for key, function in ALL.items():
        assert (function(rewards, index) == 0).all(), key


@pytest.mark.parametrize("kind", ALL)
def test_one_response_to_each_prompt_has_no_advantage(kind):
    # The batch has a spread, and no response is better than others to the same prompt.
    advantages = ALL[kind](torch.tensor([1.0, 0.0, 0.5]), torch.tensor([4, 2, 9]))
    assert advantages.tolist() == [0, 0, 0]


@pytest.mark.parametrize("kind", ALL)
def test_a_single_response_and_none_at_all(kind):
    assert ALL[kind](torch.tensor([0.7]), torch.tensor([0])).tolist() == [0]
    nothing = ALL[kind](torch.zeros(0), torch.zeros(0, dtype=torch.long))
    assert nothing.shape == (0,)


def test_the_batchs_deviation_does_not_blow_up_a_nearly_uniform_group():
    # Seven right of eight beside a group of both: of the group's own std the odd one has -2.47.
    rewards = torch.tensor([1.0] * 7 + [0.0] + [1.0, 0.0] * 4)
    index = torch.tensor([0] * 8 + [1] * 8)
    own, batch = group_mean_std(rewards, index), batch_std(rewards, index)
    assert own[7].item() == pytest.approx(-0.875 / 8**-0.5, rel=1e-6)
    assert batch[7].item() == pytest.approx(-0.875 / statistics.stdev(rewards.tolist()), rel=1e-6)
    assert batch[7].abs() < own[7].abs()


def test_leave_one_out_of_a_pair_is_the_difference():
    advantages = leave_one_out(torch.tensor([1.0, 0.25]), torch.tensor([3, 3]))
    assert advantages.tolist() == [0.75, -0.75]


@pytest.mark.parametrize(
    ("keys", "function"),
    [
        ({}, ALL["sample"]),
        ({"advantage_std": "population"}, ALL["population"]),
        ({"advantage": "batch_std"}, ALL["batch"]),
        ({"advantage": "batch_std", "advantage_std": "population"}, ALL["batch population"]),
        ({"name": "dr_grpo"}, ALL["mean"]),
        ({"name": "minirl"}, ALL["mean"]),
        ({"name": "reinforce_leave_one_out"}, ALL["leave one out"]),
        ({"name": "dr_grpo", "advantage": "group_mean_std"}, ALL["sample"]),
    ],
)
def test_the_advantage_of_a_configuration(keys, function):
    rewards, index = torch.tensor([0.1, 0.9, 0.4, 0.0, 1.0]), torch.tensor([0, 0, 0, 1, 1])
    found = build_advantages(ObjectiveSection(**keys))(rewards, index)
    assert torch.equal(found, function(rewards, index))


def test_small_but_real_spreads_are_not_damped():
    advantages = group_mean_std(
        torch.tensor([1.0, 1.0001], dtype=torch.float64), torch.zeros(2, dtype=torch.long)
    )
    root = 0.5**0.5
    torch.testing.assert_close(advantages, torch.tensor([-root, root]), rtol=1e-6, atol=0)


def test_columns_are_refused_instead_of_broadcast():
    for function in ALL.values():
        with pytest.raises(AssertionError):
            function(torch.ones(4, 1), torch.zeros(4, dtype=torch.long))
