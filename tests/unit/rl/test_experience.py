"""Records of several responses: chosen, counted, put end to end."""

from __future__ import annotations

from dataclasses import replace

import torch

from gspo_megatron.rl.rollouts import Scores, join, select_sequences, turns_and_branches
from gspo_megatron.types import RolloutBatch

PROMPT_LENGTHS, RESPONSE_LENGTHS, TURNS = [2, 1, 3, 1], [1, 4, 2, 3], [1, 2, 1, 3]
# The third has two branches.
IN_RESPONSE = [n == "r" for n in "pprprrrrprpprprrr"]


def batch_of(first: int) -> RolloutBatch:
    count, length = len(PROMPT_LENGTHS), sum(PROMPT_LENGTHS) + sum(RESPONSE_LENGTHS)
    return RolloutBatch(
        tokens=1000 * first + torch.arange(length),
        prompt_lengths=torch.tensor(PROMPT_LENGTHS),
        response_lengths=torch.tensor(RESPONSE_LENGTHS),
        rollout_logprobs=-1000.0 * first - torch.arange(sum(RESPONSE_LENGTHS)),
        truncated=torch.tensor([True, False, True, False]),
        sample_index=first + torch.arange(count),
        group_index=(first + torch.arange(count)) // 2,
        mask=torch.arange(sum(RESPONSE_LENGTHS)) % 2 == first % 2,
        routes=(1000 * first + torch.arange(length))[:, None, None].expand(length, 2, 3),
        in_response=torch.tensor(IN_RESPONSE),
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
    assert found.mask.tolist() == (found.rollout_logprobs % 2 == 1).tolist()
    assert found.in_response.tolist() == IN_RESPONSE[3:8] + IN_RESPONSE[13:]
    assert found.routes.shape == (9, 2, 3)
    assert torch.equal(found.routes[:, 1, 2], found.tokens)
    nothing = select_sequences(batch, torch.zeros(4, dtype=torch.bool))
    assert [len(value) for value in vars(nothing).values()] == [0] * 10


def test_turns_and_branches_are_counted() -> None:
    sampled = torch.tensor([n == "s" for n in "ss-ssss---"])
    turns, branches = turns_and_branches(batch_of(0), sampled)
    assert turns.tolist() == [1, 2, 2, 0]
    assert branches.tolist() == [1, 1, 2, 1]


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
    assert torch.equal(found.mask, torch.cat([batch_of(0).mask, batch_of(4).mask]))
    unrecorded = [replace(batch_of(first), mask=None, routes=None) for first in (0, 4)]
    assert join(unrecorded).routes is None and join(unrecorded).mask is None
    assert select_sequences(unrecorded[0], torch.ones(4, dtype=torch.bool)).routes is None
    assert join([scores_of(0), scores_of(4)]).turns.tolist() == TURNS + TURNS
