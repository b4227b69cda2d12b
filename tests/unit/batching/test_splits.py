"""Sequences into micro-batches: budgets and balance."""

from __future__ import annotations

import random

import pytest

from gspo_megatron.batching.plan import split_by_budget, split_evenly

SEEDS = range(40)


def random_lengths(seed: int) -> list[int]:
    source = random.Random(seed)
    largest = source.choice([3, 20, 150])  # at 150 some sequences alone exceed the budget
    return [source.randint(1, largest) for _ in range(source.randint(0, 40))]


def first_fit(lengths: list[int], budget: int) -> list[list[int]]:
    """Longest first, each into the first bin with room; bins looked through one by one."""
    bins: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        for members in bins:
            if lengths[index] <= budget - sum(lengths[i] for i in members):
                members.append(index)
                break
        else:
            bins.append([index])
    return [sorted(members) for members in bins]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("budget", [1, 7, 100, 10_000])
def test_micro_batches_are_those_of_first_fit(seed: int, budget: int) -> None:
    lengths = random_lengths(seed)
    assert split_by_budget(lengths, budget) == first_fit(lengths, budget)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("parts", [1, 2, 5, 13])
def test_each_goes_to_the_lightest_group_of_fewest(seed: int, parts: int) -> None:
    lengths = random_lengths(seed)
    groups: list[list[int]] = [[] for _ in range(parts)]
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        min(groups, key=lambda g: (sum(lengths[i] for i in g), len(g))).append(index)
    assert split_evenly(lengths, parts) == [sorted(members) for members in groups]
