"""The plan of a step: which rank trains on which sequences, and in which micro-batch. Token budgets
and balance."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from gspo_megatron.batching.plan import (
    MiniBatch,
    plan_step,
    split_by_budget,
    split_evenly,
    split_in_order,
    split_padded,
)

BUDGET = 64


def random_step(seed: int, count: int = 48) -> tuple[list[int], list[int]]:
    source = random.Random(seed)
    responses = [source.randint(1, 40) for _ in range(count)]
    return [source.randint(1, 20) + r for r in responses], responses


def plan(seed: int, **options: Any) -> list[MiniBatch]:
    lengths, responses = random_step(seed)
    defaults = {"mini_batches": 4, "data_parallel_size": 2, "token_budget": BUDGET}
    return plan_step(lengths, responses, **(defaults | options))


def numbers_of(mini_batch: MiniBatch) -> list[int]:
    ranks = mini_batch.micro_batches
    return sorted(n for micro_batches in ranks for members in micro_batches for n in members)


@pytest.mark.parametrize("data_parallel_size", [1, 2, 3, 7])
@pytest.mark.parametrize("mini_batches", [1, 3, 4])
@pytest.mark.parametrize("multiple", [1, 2, 4])
def test_every_sequence_is_trained_on_once(
    data_parallel_size: int, mini_batches: int, multiple: int
) -> None:
    lengths, responses = random_step(1)
    plans = plan(
        1,
        mini_batches=mini_batches,
        data_parallel_size=data_parallel_size,
        micro_batch_multiple=multiple,
    )
    assert len(plans) == mini_batches
    assert [n for mini_batch in plans for n in numbers_of(mini_batch)] == list(range(len(lengths)))
    for mini_batch in plans:
        numbers = numbers_of(mini_batch)
        assert mini_batch.num_sequences == len(numbers)
        assert mini_batch.num_response_tokens == sum(responses[n] for n in numbers)
        assert len(mini_batch.micro_batches) == data_parallel_size
        (per_rank,) = {len(micro_batches) for micro_batches in mini_batch.micro_batches}
        assert per_rank % multiple == 0
        full = [members for rank in mini_batch.micro_batches for members in rank if members]
        assert mini_batch.num_micro_batches == len(full)


@pytest.mark.parametrize("mini_batches", [1, 3, 5, 48])
def test_the_cut_into_mini_batches_depends_on_the_number_of_sequences_only(
    mini_batches: int,
) -> None:
    cuts = [
        [numbers_of(mini_batch) for mini_batch in plan(seed, **options)]
        for seed, options in (
            (2, {"mini_batches": mini_batches}),
            (2, {"mini_batches": mini_batches, "data_parallel_size": 5}),
            (2, {"mini_batches": mini_batches, "token_budget": 7}),
            (3, {"mini_batches": mini_batches, "micro_batch_multiple": 4}),
        )
    ]
    assert cuts[1:] == cuts[:1] * 3
    sizes = [len(numbers) for numbers in cuts[0]]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    "options", [{}, {"data_parallel_size": 3}, {"micro_batch_multiple": 4}], ids=str
)
def test_micro_batches_keep_to_the_token_budget(options: dict[str, int]) -> None:
    for seed in range(30):
        lengths, _ = random_step(seed)
        for mini_batch in plan(seed, **options):
            for members in (m for rank in mini_batch.micro_batches for m in rank):
                assert sum(lengths[n] for n in members) <= BUDGET


# With a budget of 54 tokens, first fit needs nine micro-batches. If the sequences were split evenly
# into ten micro-batches, one of them would have 55 tokens.
TIGHT = [11, 11, 13, 15, 15, 16, 17, 18, 19, 19, 20, 20, 21, 21, 23, 23, 23, 23, 24, 25, 26, 27, 27]


def test_levelling_the_number_of_micro_batches_keeps_to_the_token_budget() -> None:
    (mini_batch,) = plan_step(
        TIGHT,
        [1] * len(TIGHT),
        mini_batches=1,
        data_parallel_size=1,
        token_budget=54,
        micro_batch_multiple=2,
    )
    assert max(sum(TIGHT[n] for n in m) for m in mini_batch.micro_batches[0]) <= 54


def test_a_rank_with_fewer_micro_batches_splits_rather_than_idles() -> None:
    # Rank 0 has sequences of 59 and 2 tokens, which are together one token over the budget. The two
    # sequences of 30 tokens on rank 1 would fit into one micro-batch.
    (mini_batch,) = plan_step(
        [59, 30, 30, 2], [1] * 4, mini_batches=1, data_parallel_size=2, token_budget=60
    )
    assert mini_batch.micro_batches == (((0,), (3,)), ((1,), (2,)))


def test_ranks_without_sequences_get_empty_micro_batches() -> None:
    (mini_batch,) = plan_step(
        [10, 12], [3, 4], mini_batches=1, data_parallel_size=4, token_budget=60
    )
    assert mini_batch.num_micro_batches == 2
    assert sorted(mini_batch.micro_batches) == [((),), ((),), ((0,),), ((1,),)]


# --- Responses to a prompt stay together ----------------------------------------------------------


def grouped_step(seed: int) -> tuple[list[int], list[int], list[tuple[int, int]]]:
    source = random.Random(seed)
    lengths, responses, prompts = [], [], []
    for group in range(source.randint(2, 12)):
        prompt = source.randint(1, 30)
        for _ in range(source.randint(1, 9)):
            responses.append(source.randint(1, 34))
            lengths.append(prompt + responses[-1])
            prompts.append((group, prompt))
    return lengths, responses, prompts


def computed_tokens(members: Sequence[int], lengths: list[int], prompts: list[Any]) -> int:
    """The tokens of a micro-batch with each prompt once."""
    alone = dict(prompts[n] for n in members)
    return sum(lengths[n] - prompts[n][1] for n in members) + sum(alone.values())


def grouped_plans(seed: int, ranks: int, budget: int, multiple: int = 1) -> list[MiniBatch]:
    """The plan of a step with repeated prompts, and the plan with prompts that are computed
    once."""
    lengths, responses, prompts = grouped_step(seed)
    options: dict[str, Any] = {
        "mini_batches": 1,
        "data_parallel_size": ranks,
        "token_budget": budget,
        "micro_batch_multiple": multiple,
    }
    return [plan_step(lengths, responses, prompts=given, **options)[0] for given in (None, prompts)]


@pytest.mark.parametrize("multiple", [1, 4])
@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("budget", [BUDGET, 300])
def test_groups_stay_together(ranks: int, budget: int, multiple: int) -> None:
    for seed in range(30):
        lengths, _, prompts = grouped_step(seed)
        repeated, shared = grouped_plans(seed, ranks, budget, multiple)
        assert numbers_of(shared) == list(range(len(lengths)))
        costs = []
        for plan in (repeated, shared):
            of_ranks = []
            for rank in plan.micro_batches:
                for members in rank:
                    assert list(members) == sorted(members)
                    # The budget counts whole sequences.
                    assert len(members) == 1 or sum(lengths[n] for n in members) <= budget
                of_ranks.append(sum(computed_tokens(m, lengths, prompts) for m in rank))
            costs.append(max(of_ranks) + 0.05 * budget * len(plan.micro_batches[0]))
        # The plan is not worse than that of repeated prompts. (Heavy micro-batches are halved to
        # get an equal number on each rank, which the choice does not know.)
        if multiple == 1 and ranks == 1:
            assert costs[1] <= costs[0]


def test_a_group_that_fits_is_in_one_micro_batch() -> None:
    prompts = [(number // 4, 10) for number in range(16)]
    (plan,) = plan_step(
        [16] * 16,
        [6] * 16,
        mini_batches=1,
        data_parallel_size=2,
        token_budget=BUDGET,
        prompts=prompts,
    )
    groups = [{prompts[n][0] for n in members} for rank in plan.micro_batches for members in rank]
    assert sorted(map(sorted, groups)) == [[0], [1], [2], [3]]


def test_a_group_is_divided_if_there_are_more_ranks_than_groups() -> None:
    (plan,) = plan_step(
        [20] * 16,
        [16] * 16,
        mini_batches=1,
        data_parallel_size=4,
        token_budget=1000,
        prompts=[(number // 8, 4) for number in range(16)],
    )
    assert [[len(members) for members in rank] for rank in plan.micro_batches] == [[4]] * 4


def test_short_prompts_do_not_cost_micro_batches() -> None:
    """With prompts of a hundredth of the responses, little is saved. So the plan is about as full
    as that of repeated prompts."""
    source = random.Random(3)
    responses = [source.randint(1000, 7000) for _ in range(512)]
    lengths = [50 + response for response in responses]
    counts = []
    for prompts in (None, [(number // 8, 50) for number in range(512)]):
        (plan,) = plan_step(
            lengths,
            responses,
            mini_batches=1,
            data_parallel_size=8,
            token_budget=16_384,
            prompts=prompts,
        )
        counts.append(len(plan.micro_batches[0]))
    assert counts[1] <= counts[0] + 1


# --- The splits by themselves ---------------------------------------------------------------------


def random_lengths(seed: int) -> list[int]:
    source = random.Random(seed)
    largest = source.choice([3, 20, 150])  # with 150, some single sequences exceed the budget
    return [source.randint(1, largest) for _ in range(source.randint(0, 40))]


def first_fit(lengths: list[int], budget: int) -> list[list[int]]:
    """First fit, longest sequence first: put each sequence into the first bin that has room, by a
    search of all bins in order."""
    bins: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        for members in bins:
            if lengths[index] <= budget - sum(lengths[i] for i in members):
                members.append(index)
                break
        else:
            bins.append([index])
    return [sorted(members) for members in bins]


@pytest.mark.parametrize("budget", [1, 7, 100, 10_000])
def test_micro_batches_are_those_of_first_fit(budget: int) -> None:
    for lengths in map(random_lengths, range(40)):
        assert split_by_budget(lengths, budget) == first_fit(lengths, budget)


@pytest.mark.parametrize("budget", [1, 7, 100, 10_000])
def test_sequences_in_order_fill_the_budget(budget: int) -> None:
    for lengths in map(random_lengths, range(40)):
        bins = split_in_order(lengths, budget)
        assert [index for members in bins for index in members] == [*range(len(lengths))]
        totals = [sum(lengths[i] for i in members) for members in bins]
        for members, total in zip(bins, totals, strict=True):
            assert total <= budget or len(members) == 1
        for total, after in zip(totals, bins[1:], strict=False):
            assert total + lengths[after[0]] > budget


@pytest.mark.parametrize("parts", [1, 2, 5, 13])
def test_each_goes_to_the_lightest_group_of_fewest(parts: int) -> None:
    for lengths in map(random_lengths, range(40)):
        groups: list[list[int]] = [[] for _ in range(parts)]
        for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
            min(groups, key=lambda g: (sum(lengths[i] for i in g), len(g))).append(index)
        assert split_evenly(lengths, parts) == [sorted(members) for members in groups]


@pytest.mark.parametrize("seed", range(10))
def test_split_padded_counts_padding_and_loses_nothing(seed: int) -> None:
    source = random.Random(seed)
    draw = source.randint
    rows = [[draw(1, 90) for _ in range(draw(1, 4))] for _ in range(draw(0, 60))]
    bins = split_padded(rows, 64)
    assert sorted(n for members in bins for n in members) == list(range(len(rows)))
    for members in bins:
        all_rows = [length for n in members for length in rows[n]]
        assert len(members) == 1 or len(all_rows) * max(all_rows) <= 64
