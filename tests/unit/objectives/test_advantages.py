"""Advantages of groups and of turns, compared with Python's module `statistics` and with worked
examples."""

from __future__ import annotations

import random
import statistics
from functools import partial

import numpy as np
import pytest
import torch

from gspo_megatron.config.schema import ObjectiveSection
from gspo_megatron.errors import ConfigError
from gspo_megatron.objectives.advantages import (
    batch_std,
    build_advantages,
    group_mean,
    group_mean_std,
    leave_one_out,
    max_rl,
)
from gspo_megatron.rollout.episodes import sum_of_normalized_parts

ALL = {
    "mean": group_mean,
    "sample": group_mean_std,
    "population": partial(group_mean_std, std="population"),
    "batch": batch_std,
    "batch population": partial(batch_std, std="population"),
    "leave one out": leave_one_out,
    "max rl": max_rl,
}


@pytest.mark.parametrize("seed", range(4))
def test_groups_of_any_order_number_and_size_equal_the_statistics_module(seed):
    rng = random.Random(seed)
    numbers = [5, 0, 1000, -3]
    index = [number for number in numbers for _ in range(rng.randint(2, 6))]
    rng.shuffle(index)
    rewards = [rng.uniform(-2, 2) for _ in index]
    groups = {n: [r for r, i in zip(rewards, index, strict=True) if i == n] for n in numbers}
    pairs = list(zip(rewards, index, strict=True))
    centred = [r - statistics.mean(groups[i]) for r, i in pairs]
    divisors = {
        "mean": [1.0 for _ in index],
        "sample": [statistics.stdev(groups[i]) for i in index],
        "population": [statistics.pstdev(groups[i]) for i in index],
        "batch": [statistics.stdev(rewards) for _ in index],
        "batch population": [statistics.pstdev(rewards) for _ in index],
    }
    expected = {
        key: [c / d for c, d in zip(centred, each, strict=True)] for key, each in divisors.items()
    }
    expected["leave one out"] = [  # the reward minus the mean of the others
        r - (sum(groups[i]) - r) / (len(groups[i]) - 1) for r, i in pairs
    ]
    means = {number: statistics.mean(values) for number, values in groups.items()}
    expected["max rl"] = [(r - means[i]) / means[i] if means[i] > 0 else 0.0 for r, i in pairs]
    tensors = torch.tensor(rewards, dtype=torch.float64), torch.tensor(index)
    assert expected.keys() == ALL.keys()
    for key, values in expected.items():
        found = ALL[key](*tensors)
        assert found.dtype == torch.float32
        # The only rounding is that of the result to float32.
        assert found.tolist() == pytest.approx(values, rel=1e-7, abs=1e-7), key
    # groups with a negative and with a positive mean: both cases of max_rl
    assert min(means.values()) < 0 < max(means.values()) or seed != 0


@pytest.mark.parametrize("reward", [0.0, 0.1, 1.0, -0.7, 1e6])
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_a_group_without_spread_has_advantages_of_exactly_zero(reward, size):
    # The mean of 0.1, 0.1 and 0.1 is not exactly 0.1. If the remainder were divided by its own
    # deviation, advantages would be +1 or -1.
    rewards = torch.tensor([reward] * size + [1.0, 0.0])
    index = torch.tensor([0] * size + [1, 1])
    for key, function in ALL.items():
        advantages = function(rewards, index)
        assert (advantages[:size] == 0).all(), key
        assert (advantages[size:] != 0).all(), key


@pytest.mark.parametrize("kind", ALL)
def test_what_has_no_spread_within_a_group_has_no_advantage(kind):
    # differences by rounding are not a spread
    rounded = torch.tensor([0.1 + 0.2, 0.3, 0.30000001, 0.3])
    rounded[1] = torch.nextafter(rounded[1], torch.tensor(1.0))
    assert len(rounded.unique()) == 2
    assert ALL[kind](rounded, torch.zeros(4, dtype=torch.long)).tolist() == [0, 0, 0, 0]
    # With one response for each prompt, the batch has a spread, but no group has one.
    assert ALL[kind](torch.tensor([1.0, 0.0, 0.5]), torch.tensor([4, 2, 9])).tolist() == [0, 0, 0]
    assert ALL[kind](torch.tensor([0.7]), torch.tensor([0])).tolist() == [0]
    assert ALL[kind](torch.zeros(0), torch.zeros(0, dtype=torch.long)).shape == (0,)


@pytest.mark.parametrize(
    ("keys", "kind"),
    [
        ({}, "sample"),
        ({"advantage_std": "population"}, "population"),
        ({"advantage": "batch_std"}, "batch"),
        ({"advantage": "batch_std", "advantage_std": "population"}, "batch population"),
        ({"name": "dr_grpo"}, "mean"),
        ({"name": "minirl"}, "mean"),
        ({"name": "reinforce_leave_one_out"}, "leave one out"),
        ({"name": "dr_grpo", "advantage": "group_mean_std"}, "sample"),
        ({"advantage": "max_rl"}, "max rl"),
    ],
)
def test_the_advantage_of_a_configuration(keys, kind):
    rewards, index = torch.tensor([0.1, 0.9, 0.4, 0.0, 1.0]), torch.tensor([0, 0, 0, 1, 1])
    found = build_advantages(ObjectiveSection(**keys)).of_sequences(rewards, index)
    assert torch.equal(found, ALL[kind](rewards, index))


@pytest.mark.parametrize("weights", [None, [2.0, -0.5, 3.0]])
@pytest.mark.parametrize("std", ["sample", "population"])
@pytest.mark.parametrize("seed", range(3))
def test_gdpo_normalises_each_part_in_its_group_and_adds_up(
    seed: int, std: str, weights: list[float] | None
) -> None:
    rng = random.Random(seed)
    index = [7, 7, 7, 2, 2, 2, 2]
    parts = {
        "right": [float(rng.random() < 0.5) for _ in index],
        "short": [rng.gauss(0, 100) for _ in index],
        "constant": [0.3] * 7,  # a reward without spread adds 0 and not NaN
    }
    deviation = statistics.stdev if std == "sample" else statistics.pstdev
    expected = [0.0] * len(index)
    for values, weight in zip(parts.values(), weights or [1.0] * 3, strict=True):
        for group in set(index):
            rows = [row for row, number in enumerate(index) if number == group]
            own = [values[row] for row in rows]
            for row in rows if max(own) > min(own) else ():
                expected[row] += weight * (values[row] - statistics.mean(own)) / deviation(own)
    columns = np.array(list(parts.values()))
    summed = sum_of_normalized_parts(columns, np.array(index), std, weights)
    section = ObjectiveSection(advantage="gdpo", advantage_std=std)
    found = build_advantages(section).of_sequences(torch.tensor(summed), torch.tensor(index))
    assert found.dtype == torch.float32
    assert found.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_gdpo_of_a_failed_call_a_group_of_one_and_equal_parts() -> None:
    parts = np.array([[1.0, np.nan, 0.1 + 0.2, 0.3, 5.0], [0.0, np.nan, 1.0, 1.0, 5.0]])
    found = sum_of_normalized_parts(parts, np.array([0, 0, 1, 1, 2]), "sample")
    assert np.isnan(found[:2]).all() and found[2:].tolist() == [0, 0, 0]


def test_small_but_real_spreads_are_not_damped():
    rewards = torch.tensor([1.0, 1.0001], dtype=torch.float64)
    advantages = group_mean_std(rewards, torch.zeros(2, dtype=torch.long))
    root = 0.5**0.5
    torch.testing.assert_close(advantages, torch.tensor([-root, root]), rtol=1e-6, atol=0)


def test_columns_are_refused_instead_of_broadcast():
    for function in ALL.values():
        with pytest.raises(AssertionError):
            function(torch.ones(4, 1), torch.zeros(4, dtype=torch.long))


# --- Turns, compared with float64 loops over groups, responses, turns and tokens -----------------

Response = tuple[int, list[float], list[int]]  # group, turn rewards, turn tokens


def responses(seed: int) -> list[Response]:
    """Groups of three responses in random order. The group numbers have gaps. A response has 1 to 4
    turns, and group 17 has no spread."""
    draw = random.Random(seed)
    groups = [4, 9, 17, 30] * 3
    draw.shuffle(groups)
    found = []
    for group in groups:
        turns = draw.randint(1, 4)
        rewards = [0.3 if group == 17 else draw.gauss(0, 1) for _ in range(turns)]
        found.append((group, rewards, [draw.randint(1, 5) for _ in range(turns)]))
    return found


def token_advantages(found: list[Response], **keys: object) -> list[float]:
    estimator = build_advantages(ObjectiveSection(**{"name": "gspo_token"} | keys))
    advantages = estimator.of_turns(
        torch.tensor([r for _, rewards, _ in found for r in rewards], dtype=torch.float64),
        torch.tensor([len(rewards) for _, rewards, _ in found], dtype=torch.long),
        torch.tensor([n for _, _, tokens in found for n in tokens], dtype=torch.long),
        torch.tensor([group for group, _, _ in found], dtype=torch.long),
    )
    assert advantages.dtype == torch.float32
    return advantages.tolist()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("std", ["sample", "population"])
@pytest.mark.parametrize("name", ["gspo_token", "grpo", "dr_grpo"])
def test_every_turn_is_an_observation_of_its_group(name: str, std: str, seed: int) -> None:
    found = responses(seed)
    deviation = statistics.stdev if std == "sample" else statistics.pstdev
    expected = []
    for group, rewards, tokens in found:
        observed = [r for other, turns, _ in found if other == group for r in turns]
        divisor = 1.0 if name == "dr_grpo" else deviation(observed)
        for reward, count in zip(rewards, tokens, strict=True):
            centred = 0.0 if group == 17 else reward - statistics.mean(observed)
            expected += [centred / (divisor or 1.0)] * count
    advantages = token_advantages(found, name=name, advantage_std=std)
    assert advantages == pytest.approx(expected, rel=1e-6, abs=1e-7)


def test_one_turn_a_response_is_the_advantage_of_the_response() -> None:
    found = [(0, [r], [n]) for r, n in zip([0.8, 0.4, 0.6], [1, 3, 2], strict=True)]
    assert token_advantages(found) == pytest.approx([1, -1, -1, -1, 0, 0], abs=1e-6)
    # A custom objective may use turn rewards, too. A rank may have no responses.
    assert token_advantages(found, import_path="m:f") == token_advantages(found)
    assert token_advantages([]) == []


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"name": "gspo"}, ["objective.name = 'gspo': "]),
        ({"name": "luspo"}, ["objective.name = 'luspo': "]),
        ({"name": "grpo", "ratio": "sequence"}, ["objective.ratio = 'sequence': "]),
        ({"advantage": "batch_std"}, ["objective.advantage = 'batch_std': "]),
        ({"advantage": "leave_one_out"}, ["objective.advantage = 'leave_one_out': "]),
        (
            {"advantage_import_path": "operator:sub"},
            ["objective.advantage_import_path = 'operator:sub': "],
        ),
        ({"kl": "k1", "kl_coefficient": 1.0, "kl_in": "reward"}, ["objective.kl_in = 'reward': "]),
        (
            {"name": "reinforce_leave_one_out"},
            [
                "objective.name = 'reinforce_leave_one_out': ",
                "objective.advantage = 'leave_one_out': ",
            ],
        ),
    ],
)
def test_what_cannot_use_rewards_of_turns_is_refused(
    keys: dict[str, object], expected: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        token_advantages(responses(0), **keys)
    assert len(caught.value.problems) == len(expected)
    for problem, start in zip(caught.value.problems, expected, strict=True):
        assert problem.startswith(start)
        assert "rewards of turns" in problem
    if "objective.name" in expected[0]:
        assert "gspo_token, grpo" in caught.value.problems[0]
        assert "or one reward for a whole response" in caught.value.problems[0]
