"""Dynamic sampling: which groups of a step are trained on, and when more prompts are drawn."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gspo_megatron.rl.rollouts import DynamicSampling, Scores, join, select_sequences
from gspo_megatron.types import RolloutBatch

YES, NO = True, False


def selection(*rounds: list[bool], max_refills: int = 2) -> DynamicSampling:
    """After these rounds, each of which was wanted."""
    chosen = DynamicSampling(len(rounds[0]), max_refills)
    for has_spread in rounds:
        assert chosen.wants_more
        chosen.add(has_spread)
    return chosen


@pytest.mark.parametrize(
    ("rounds", "wants_more", "groups", "metrics"),
    [
        ([[YES, YES, YES]], False, [0, 1, 2], (0, 0, 0)),
        ([[NO, YES, NO]], True, [1], (0, 2, 0)),
        ([[NO, YES, NO], [NO, YES, YES]], False, [1, 4, 5], (1, 3, 0)),
        # too many: the last of them go
        ([[NO, YES, YES], [YES, YES, NO]], False, [1, 2, 3], (1, 3, 0)),
        ([[NO, YES, NO], [NO, NO, NO], [NO, NO, YES]], False, [1, 8], (2, 7, 0)),
        # nothing at all: the first round, after all refills
        ([[NO, NO, NO], [NO, NO, NO]], True, [0, 1, 2], (1, 3, 1)),
        ([[NO, NO, NO]] * 3, False, [0, 1, 2], (2, 6, 1)),
    ],
)
def test_groups_with_spread_are_taken_in_order(
    rounds: list[list[bool]], wants_more: bool, groups: list[int], metrics: tuple[int, int, int]
) -> None:
    chosen = selection(*rounds)
    assert chosen.wants_more is wants_more
    assert chosen.groups() == groups
    names = ("rollout/refills", "rollout/groups_dropped", "rollout/no_spread")
    assert chosen.metrics() == dict(zip(names, metrics, strict=True))


def test_without_refills_groups_are_dropped_all_the_same() -> None:
    chosen = selection([YES, NO], max_refills=0)
    assert not chosen.wants_more
    assert chosen.groups() == [0]


def test_switched_off_it_takes_one_draw_whole() -> None:
    chosen = DynamicSampling(2, 3, enabled=False)
    assert chosen.wants_more
    chosen.add([NO, YES])
    assert not chosen.wants_more
    assert chosen.groups() == chosen.candidates(0) == [0, 1]
    assert chosen.metrics() == {}


def test_further_draws_keep_only_groups_that_may_be_chosen() -> None:
    chosen = selection([NO, YES, NO])
    assert chosen.candidates(0) == [0, 1, 2]
    chosen.add([NO, YES, NO])
    assert chosen.candidates(3) == [4]


PROMPTS, RESPONSES, TURNS = [2, 1, 3, 1], [1, 4, 2, 3], [1, 2, 1, 3]


def batch_of(first: int) -> RolloutBatch:
    count, length = len(PROMPTS), sum(PROMPTS) + sum(RESPONSES)
    return RolloutBatch(
        tokens=1000 * first + torch.arange(length),
        prompt_lengths=torch.tensor(PROMPTS),
        response_lengths=torch.tensor(RESPONSES),
        rollout_logprobs=-1000.0 * first - torch.arange(sum(RESPONSES)),
        truncated=torch.tensor([True, False, True, False]),
        sample_index=first + torch.arange(count),
        group_index=(first + torch.arange(count)) // 2,
        routes=(1000 * first + torch.arange(length))[:, None, None].expand(length, 2, 3),
    )


def scores_of(first: int) -> Scores:
    rewards = first + torch.arange(len(TURNS), dtype=torch.float64)
    return Scores(
        rewards=rewards,
        shaped=rewards / 2,
        turns=torch.tensor(TURNS),
        turn_rewards=first + torch.arange(sum(TURNS), dtype=torch.float64) / 16,
        turn_tokens=torch.tensor([1, 3, 1, 2, 1, 1, 1]),
    )


def test_selected_sequences_stay_whole() -> None:
    batch, rows = batch_of(1), torch.tensor([False, True, False, True])
    found = select_sequences(batch, rows)
    assert found.sample_index.tolist() == [2, 4]
    assert found.group_index.tolist() == [1, 2]
    assert found.prompt_lengths.tolist() == [1, 1]
    assert found.response_lengths.tolist() == [4, 3]
    assert found.truncated.tolist() == [False, False]
    assert found.tokens.tolist() == [1003, 1004, 1005, 1006, 1007, 1013, 1014, 1015, 1016]
    assert found.rollout_logprobs.tolist() == [-1001, -1002, -1003, -1004, -1007, -1008, -1009]
    assert found.routes.shape == (9, 2, 3)
    assert torch.equal(found.routes[:, 1, 2], found.tokens)
    nothing = select_sequences(batch, torch.zeros(4, dtype=torch.bool))
    assert [len(value) for value in vars(nothing).values()] == [0] * 8


def test_selected_scores_keep_their_turns() -> None:
    found = scores_of(10).select(torch.tensor([False, True, False, True]))
    assert found.rewards.tolist() == [11, 13]
    assert found.shaped.tolist() == [5.5, 6.5]
    assert found.turns.tolist() == [2, 3]
    assert (16 * (found.turn_rewards - 10)).tolist() == [1, 2, 4, 5, 6]
    assert found.turn_tokens.tolist() == [3, 1, 1, 1, 1]


def test_rounds_are_put_end_to_end() -> None:
    found = join([batch_of(0), batch_of(4)])
    assert found.sample_index.tolist() == list(range(8))
    assert torch.equal(found.tokens, torch.cat([batch_of(0).tokens, batch_of(4).tokens]))
    assert torch.equal(found.routes[:, 0, 0], found.tokens)
    unrecorded = [replace(batch_of(first), routes=None) for first in (0, 4)]
    assert join(unrecorded).routes is None
    assert select_sequences(unrecorded[0], torch.ones(4, dtype=torch.bool)).routes is None
    assert join([scores_of(0), scores_of(4)]).turns.tolist() == TURNS + TURNS
