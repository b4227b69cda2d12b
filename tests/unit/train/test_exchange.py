"""The exchange of sequences where there is nobody to exchange them with."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from gspo_megatron.train.exchange import Sequences, exchange, index_step
from gspo_megatron.types import RolloutBatch

pytestmark = pytest.mark.usefixtures("one_rank")

PROMPTS, RESPONSES = [3, 1, 2, 5, 1], [4, 1, 6, 2, 3]


def make_batch(sample_index: list[int]) -> RolloutBatch:
    lengths = [p + r for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    return RolloutBatch(
        tokens=torch.arange(100, 100 + sum(lengths)),
        prompt_lengths=torch.tensor(PROMPTS),
        response_lengths=torch.tensor(RESPONSES),
        logprobs=-torch.arange(sum(RESPONSES)).float(),
        truncated=torch.zeros(5, dtype=torch.bool),
        sample_index=torch.tensor(sample_index),
        group_index=torch.tensor(sample_index) // 2,
    )


def exchanged(batch: RolloutBatch, advantages: list[float]) -> Sequences:
    group = dist.group.WORLD
    index = index_step(batch, group)
    return exchange(batch, torch.tensor(advantages), index, [[0]] * len(index.source), group)


def test_on_one_rank_everything_stays_in_order() -> None:
    batch = make_batch([0, 1, 2, 3, 4])
    index = index_step(batch, dist.group.WORLD)
    assert index.source == (0,) * 5
    assert index.prompt_lengths == tuple(PROMPTS)
    assert index.response_lengths == tuple(RESPONSES)
    assert index.lengths == (7, 2, 8, 7, 4)
    sequences = exchanged(batch, [0.5, -1.0, 2.0, 0.0, 1.25])
    assert torch.equal(torch.cat([sequences.tokens[n] for n in range(5)]), batch.tokens)
    assert torch.equal(sequences.logprobs, batch.logprobs)
    assert sequences.offsets == {0: 0, 1: 4, 2: 5, 3: 11, 4: 13}
    assert sequences.advantages == {0: 0.5, 1: -1.0, 2: 2.0, 3: 0.0, 4: 1.25}


def test_sequences_are_numbered_by_their_sample_index() -> None:
    samples = [11, 4, 90, 7, 5]  # numbers 3, 0, 4, 2, 1 of the step
    numbers = [3, 0, 4, 2, 1]
    batch = make_batch(samples)
    advantages = [10.0, 20.0, 30.0, 40.0, 50.0]
    index = index_step(batch, dist.group.WORLD)
    sequences = exchanged(batch, advantages)
    lengths = (batch.prompt_lengths + batch.response_lengths).tolist()
    for row, (number, tokens, logprobs) in enumerate(
        zip(numbers, batch.tokens.split(lengths), batch.logprobs.split(RESPONSES), strict=True)
    ):
        assert index.prompt_lengths[number] == PROMPTS[row]
        assert torch.equal(sequences.tokens[number], tokens)
        start = sequences.offsets[number]
        assert torch.equal(sequences.logprobs[start : start + RESPONSES[row]], logprobs)
        assert sequences.advantages[number] == advantages[row]


def test_a_sample_index_that_occurs_twice_is_refused() -> None:
    with pytest.raises(AssertionError, match="sample index used twice"):
        index_step(make_batch([0, 1, 2, 1, 4]), dist.group.WORLD)
