"""Responses of several requests: the choice of groups, their counts, and joining them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from gspo_megatron.errors import DataError
from gspo_megatron.rl.rollout_metrics import turns_and_branches
from gspo_megatron.rollout.types import RolloutGroup

PROMPT_LENGTHS, RESPONSE_LENGTHS, TURNS = [2, 1, 3, 1], [1, 4, 2, 3], [1, 2, 1, 3]
# The third response has two branches.
IN_RESPONSE = [n == "r" for n in "pprprrrrprpprprrr"]


def group_of(first: int) -> RolloutGroup:
    count, length = len(PROMPT_LENGTHS), sum(PROMPT_LENGTHS) + sum(RESPONSE_LENGTHS)
    rewards = first + np.arange(count, dtype=float)
    tokens = 1000 * first + np.arange(length)
    return RolloutGroup(
        tokens=tokens,
        prompt_lengths=np.array(PROMPT_LENGTHS),
        response_lengths=np.array(RESPONSE_LENGTHS),
        rollout_logprobs=(-1000.0 * first - np.arange(sum(RESPONSE_LENGTHS))).astype(np.float32),
        truncated=np.array([True, False, True, False]),
        sample_index=first + np.arange(count),
        group_index=(first + np.arange(count)) // 2,
        mask=np.arange(sum(RESPONSE_LENGTHS)) % 2 == first % 2,
        routes=np.broadcast_to(tokens[:, None, None], (length, 2, 3)).astype(np.int16),
        layers=np.array([1, 2]),
        in_response=np.array(IN_RESPONSE),
        rewards=rewards,
        shaped=rewards / 2,
        turns=np.array(TURNS),
        turn_rewards=first + np.arange(sum(TURNS)) / 16,
        turn_tokens=np.array([1, 3, 1, 2, 1, 1, 1]),
        reasons=[f"of {n}" for n in range(first, first + count)],
        failed_calls=np.array([1, 0, 2]),
    ).checked()


def test_selected_sequences_stay_whole() -> None:
    group, rows = group_of(1), np.array([False, True, False, True])
    found = group.select(rows)
    assert found.sample_index.tolist() == [2, 4]
    assert found.group_index.tolist() == [1, 2]
    assert found.prompt_lengths.tolist() == [1, 1]
    assert found.response_lengths.tolist() == [4, 3]
    assert found.truncated.tolist() == [False, False]
    assert found.tokens.tolist() == [1003, 1004, 1005, 1006, 1007, 1013, 1014, 1015, 1016]
    assert found.rollout_logprobs.tolist() == [-1001, -1002, -1003, -1004, -1007, -1008, -1009]
    assert found.mask.tolist() == (found.rollout_logprobs % 2 == 1).tolist()
    assert found.in_response.tolist() == IN_RESPONSE[3:8] + IN_RESPONSE[13:]
    assert found.routes.shape == (9, 2, 3)
    assert found.routes[:, 1, 2].tolist() == found.tokens.tolist()
    assert found.reasons == ["of 2", "of 4"]
    assert (found.turns.tolist(), found.turn_tokens.tolist()) == ([2, 3], [3, 1, 1, 1, 1])
    assert (16 * (found.turn_rewards - 1)).tolist() == [1, 2, 4, 5, 6]
    assert group.of_prompts([1]).sample_index.tolist() == [2, 3]
    nothing = group.nothing()
    names = ("tokens", "mask", "routes", "turns", "reasons")
    assert {len(getattr(nothing, name)) for name in names} == {0}
    assert nothing.failed == (0, 0, 0)


def test_turns_and_branches_are_counted() -> None:
    sampled = torch.tensor([n == "s" for n in "ss-ssss---"])
    turns, branches = turns_and_branches(group_of(0).to_batch(torch.device("cpu")), sampled)
    assert turns.tolist() == [1, 2, 2, 0]
    assert branches.tolist() == [1, 1, 2, 1]


def test_draws_are_put_end_to_end() -> None:
    found = RolloutGroup.join([group_of(0), group_of(4)])
    assert found.sample_index.tolist() == list(range(8))
    assert found.tokens.tolist() == [*group_of(0).tokens, *group_of(4).tokens]
    assert found.routes[:, 0, 0].tolist() == found.tokens.tolist()
    assert found.mask.tolist() == [*group_of(0).mask, *group_of(4).mask]
    assert found.turns.tolist() == TURNS + TURNS
    assert found.failed == (2, 0, 4) and found.reasons == [f"of {n}" for n in range(8)]
    plain = [replace(group_of(first), mask=None, routes=None) for first in (0, 4)]
    assert RolloutGroup.join(plain).routes is None and RolloutGroup.join(plain).mask is None
    # An earlier version stored groups without reasons.
    older = replace(group_of(4), reasons=None)
    assert RolloutGroup.join([group_of(0), older]).reasons is None
    with pytest.raises(DataError, match="group 2 lacks routes"):
        RolloutGroup.join([group_of(0), replace(group_of(4), routes=None)])


def test_parts_that_nobody_knew_yet_are_no_numbers() -> None:
    """All calls of the reward failed for the first request, so the names of its parts are
    unknown."""
    first = replace(group_of(0), parts=np.zeros((4, 0)), part_names=None)
    then = replace(group_of(4), parts=np.ones((4, 2)), part_names=("even", "late"))
    found = RolloutGroup.join([first, then])
    assert found.part_names == ("even", "late")
    assert np.isnan(found.parts[:4]).all() and (found.parts[4:] == 1).all()


def test_columns_that_do_not_fit_are_named() -> None:
    with pytest.raises(DataError, match="truncated has 3 rows for 4 sequences; turn_rewards has 7"):
        replace(group_of(0), truncated=np.ones(3, bool), turns=np.ones(4, np.int64)).checked()
    with pytest.raises(DataError, match="tokens is of type float64"):
        replace(group_of(0), tokens=np.ones(17)).checked()
    with pytest.raises(DataError, match="tokens has 16 rows for 17 tokens"):
        replace(group_of(0), tokens=np.ones(16, int)).checked()
