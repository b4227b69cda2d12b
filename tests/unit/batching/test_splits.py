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


def loads(groups: list[list[int]], lengths: list[int]) -> list[int]:
    return [sum(lengths[i] for i in members) for members in groups]


@pytest.mark.parametrize("seed", SEEDS)
def test_micro_batches_keep_to_the_budget_and_lose_nothing(seed: int) -> None:
    lengths, budget = random_lengths(seed), 100
    bins = split_by_budget(lengths, budget)
    assert sorted(i for members in bins for i in members) == list(range(len(lengths)))
    for members, load in zip(bins, loads(bins, lengths), strict=True):
        assert members == sorted(members) and members
        assert load <= budget or len(members) == 1
    assert bins == split_by_budget(list(lengths), budget)
    # First fit: nothing in a later micro-batch would have found room in an earlier one.
    filled = loads(bins, lengths)
    for later in range(len(bins)):
        smallest = min(lengths[i] for i in bins[later])
        assert all(filled[earlier] + smallest > budget for earlier in range(later))


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


def test_known_packings() -> None:
    assert split_by_budget([], 10) == []
    assert split_by_budget([10, 10], 10) == [[0], [1]]
    assert split_by_budget([6, 4, 5, 5], 10) == [[0, 1], [2, 3]]
    assert split_by_budget([3, 25, 3], 10) == [[1], [0, 2]]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("parts", [1, 2, 5, 13])
def test_groups_are_balanced(seed: int, parts: int) -> None:
    lengths = random_lengths(seed)
    groups = split_evenly(lengths, parts)
    assert len(groups) == parts
    assert sorted(i for members in groups for i in members) == list(range(len(lengths)))
    filled = loads(groups, lengths)
    heaviest = filled.index(max(filled))
    if groups[heaviest]:
        # The last, smallest sequence of the heaviest group went to what was then the lightest.
        assert max(filled) - min(filled) <= min(lengths[i] for i in groups[heaviest])
    empty = sum(not members for members in groups)
    assert empty == max(0, parts - len(lengths))
    assert groups == split_evenly(list(lengths), parts)


@pytest.mark.parametrize("seed", SEEDS)
def test_each_goes_to_the_lightest_group_of_fewest(seed: int) -> None:
    lengths = random_lengths(seed)
    groups: list[list[int]] = [[] for _ in range(5)]
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        min(groups, key=lambda g: (sum(lengths[i] for i in g), len(g))).append(index)
    assert split_evenly(lengths, 5) == [sorted(members) for members in groups]


def test_equal_lengths_are_dealt_out_evenly() -> None:
    sizes = [len(members) for members in split_evenly([8] * 14, 4)]
    assert sorted(sizes) == [3, 3, 4, 4]
