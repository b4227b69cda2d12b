"""Redistribution on a single rank: numbering and order of the sequences."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from gspo_megatron.batching.plan import MiniBatch
from gspo_megatron.batching.redistribute import Sequences, StepIndex, gather_index, redistribute
from gspo_megatron.types import RolloutBatch

pytestmark = pytest.mark.usefixtures("one_rank")

PROMPTS, RESPONSES = [3, 1, 2, 5, 1], [4, 1, 6, 2, 3]


def make_batch(sample_index: list[int]) -> RolloutBatch:
    lengths = [p + r for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    return RolloutBatch(
        tokens=torch.arange(100, 100 + sum(lengths)),
        prompt_lengths=torch.tensor(PROMPTS),
        response_lengths=torch.tensor(RESPONSES),
        rollout_logprobs=-torch.arange(sum(RESPONSES)).float(),
        truncated=torch.zeros(5, dtype=torch.bool),
        sample_index=torch.tensor(sample_index),
        group_index=torch.tensor(sample_index) // 2,
    )


def on_one_rank(count: int) -> list[MiniBatch]:
    return [MiniBatch(((tuple(range(count)),),), count, 0)]


def indexed(batch: RolloutBatch, rewards: list[float] | None = None) -> StepIndex:
    values = torch.tensor(rewards or [0.0] * 5, dtype=torch.float64)
    return gather_index(batch, values, dist.group.WORLD)


def exchanged(batch: RolloutBatch, token_advantages: torch.Tensor | None = None) -> Sequences:
    return redistribute(
        batch, indexed(batch), on_one_rank(5), dist.group.WORLD, token_advantages=token_advantages
    )


def test_on_one_rank_everything_stays_in_order() -> None:
    batch = make_batch([0, 1, 2, 3, 4])
    index = indexed(batch, [0.5, -1.0, 2.0, 0.1, 1.25])
    assert index.source == (0,) * 5
    assert index.prompt_lengths == tuple(PROMPTS)
    assert index.response_lengths == tuple(RESPONSES)
    assert index.lengths == (7, 2, 8, 7, 4)
    assert index.groups == (0, 0, 1, 1, 2)
    assert index.prompts() == [(0, 3), (0, 1), (1, 2), (1, 5), (2, 1)]
    assert index.rewards.tolist() == [0.5, -1.0, 2.0, 0.1, 1.25]  # float64, bit for bit
    sequences = exchanged(batch)
    assert torch.equal(torch.cat([sequences.tokens[n] for n in range(5)]), batch.tokens)
    assert torch.equal(sequences.rollout_logprobs, batch.rollout_logprobs)
    assert sequences.offsets == {0: 0, 1: 4, 2: 5, 3: 11, 4: 13}
    assert sequences.token_advantages is None
    own = torch.arange(sum(RESPONSES)) / 8
    assert torch.equal(exchanged(batch, own).token_advantages, own)


def test_branches_are_known_by_their_sequence() -> None:
    kinds = "pprrprrprpprrrrrrppppprrprrr"
    batch = replace(
        make_batch([3, 0, 4, 1, 2]), in_response=torch.tensor([k == "r" for k in kinds])
    )
    index = indexed(batch)
    assert index.branches == (((1, 1),), ((5, 2),), ((1, 3),), ((2, 2), (1, 2)), ((2, 6),))
    assert [length for _, length in index.prompts()] == [1, 5, 1, 2, 2]
    assert index.branch_lengths() == [[2], [7], [4], [4, 3], [8]]
    plain = indexed(make_batch([0, 1, 2, 3, 4]))
    assert plain.branches is None and plain.branch_lengths() == [[7], [2], [8], [7], [4]]


def test_sequences_are_numbered_by_their_sample_index() -> None:
    samples = [11, 4, 90, 7, 5]
    numbers = [3, 0, 4, 2, 1]
    batch = make_batch(samples)
    rewards = [10.0, 20.0, 30.0, 40.0, 50.0]
    index = indexed(batch, rewards)
    sequences = exchanged(batch)
    lengths = (batch.prompt_lengths + batch.response_lengths).tolist()
    for row, (number, tokens, logprobs) in enumerate(
        zip(
            numbers,
            batch.tokens.split(lengths),
            batch.rollout_logprobs.split(RESPONSES),
            strict=True,
        )
    ):
        assert index.prompt_lengths[number] == PROMPTS[row]
        assert torch.equal(sequences.tokens[number], tokens)
        start = sequences.offsets[number]
        assert torch.equal(sequences.rollout_logprobs[start : start + RESPONSES[row]], logprobs)
        assert index.rewards[number] == rewards[row]
        assert index.groups[number] == samples[row] // 2


def test_a_sample_index_that_occurs_twice_is_refused() -> None:
    with pytest.raises(AssertionError, match="sample index used twice"):
        indexed(make_batch([0, 1, 2, 1, 4]))


class Operators(TorchDispatchMode):
    """Counts the tensor operations of a block."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


def test_the_number_of_operations_does_not_grow_with_the_sequences() -> None:
    """A step of a large run has 65,536 sequences. One operation for each sequence would take
    seconds."""
    counts = []
    for size in (8, 512):
        ones = torch.ones(size, dtype=torch.long)
        batch = RolloutBatch(
            tokens=torch.arange(2 * size),
            prompt_lengths=ones,
            response_lengths=ones,
            rollout_logprobs=torch.zeros(size),
            truncated=ones.bool(),
            sample_index=torch.arange(size).flip(0),
            group_index=torch.arange(size) // 2,
        )
        with Operators() as operators:
            index = gather_index(batch, torch.zeros(size, dtype=torch.float64), dist.group.WORLD)
            redistribute(batch, index, on_one_rank(size), dist.group.WORLD)
        counts.append(operators.count)
    assert counts[0] == counts[1]
