"""Padded micro-batches, a row for each sequence, and micro-batches of one shape for all."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from gspo_megatron.batching.micro_batches import BatchShape, PackedBatch, batch_shape, pack
from gspo_megatron.batching.plan import split_padded

PAD = 7


def random_sequences(
    seed: int, count: int = 6, longest: int = 23
) -> tuple[list[Tensor], list[int]]:
    source = random.Random(seed)
    tokens, responses = [], []
    for _ in range(count):
        response = source.randint(0, longest)
        length = response + source.randint(1, longest)
        tokens.append(torch.tensor([source.randint(100, 10_000) for _ in range(length)]))
        responses.append(response)
    return tokens, responses


def found(shards: list[PackedBatch]) -> dict[tuple[int, int], tuple[int, int, int]]:
    """(sequence, position of the row that predicts) -> (its token, the target, flat index)."""
    result = {}
    for shard in shards:
        rows = shard.input_ids.shape[0]
        for number, row in enumerate(shard.token_rows.tolist()):
            step, place = divmod(row, rows)  # hidden states are [tokens, rows]
            assert place == int(shard.sequence_index[number])
            key = (place, int(shard.position_ids[place, step]))
            assert key not in result, "two shards predict one token"
            result[key] = (
                int(shard.input_ids[place, step]),
                int(shard.targets[number]),
                int(shard.response_index[number]),
            )
    return result


def expected(
    tokens: list[Tensor], responses: list[int], offsets: list[int], members: list[int]
) -> dict[tuple[int, int], tuple[int, int, int]]:
    result = {}
    for place, n in enumerate(members):
        prompt = len(tokens[n]) - responses[n]
        for step in range(responses[n]):
            before, target = tokens[n][prompt + step - 1 : prompt + step + 1].tolist()
            result[place, prompt + step - 1] = (before, target, offsets[n] + step)
    return result


@pytest.mark.parametrize("cp", [1, 2, 3])
@pytest.mark.parametrize("multiple", [1, 2, 3])
@pytest.mark.parametrize("extra", [None, (2, 36), (0, 72)])
def test_shards_predict_every_response_token_once(
    cp: int, multiple: int, extra: tuple[int, int] | None
) -> None:
    tokens, responses = random_sequences(10 * cp + multiple)
    offsets = [sum(responses[:n]) for n in range(len(responses))]
    members = [4, 0, 3]
    lengths = [len(tokens[n]) for n in members]
    smallest = batch_shape(lengths, padded=True, context_parallel_size=cp, multiple=multiple)
    shape = smallest
    if extra is not None:
        shape = BatchShape(smallest.rows + extra[0], smallest.tokens + extra[1])
    shards = [
        pack(
            tokens,
            responses,
            offsets,
            members,
            pad_id=PAD,
            padded=True,
            context_parallel_size=cp,
            context_parallel_rank=rank,
            multiple=multiple,
            shape=shape if extra else None,
        )
        for rank in range(cp)
    ]
    assert found(shards) == expected(tokens, responses, offsets, members)
    for shard in shards:
        assert shard.input_ids.shape == shard.position_ids.shape
        assert shard.input_ids.shape == (shape.rows, shape.tokens // cp)
        assert shard.input_ids.shape[1] % multiple == 0
        assert shard.padding_mask.shape == shard.input_ids.shape
        assert (shard.input_ids[shard.padding_mask] == PAD).all()
    real = sum(int((~shard.padding_mask).sum()) for shard in shards)
    assert real == sum(lengths)


def test_rows_of_equal_length_have_no_padding() -> None:
    tokens = [torch.arange(5), torch.arange(5, 10)]
    batch = pack(tokens, [2, 3], [0, 2], [0, 1], pad_id=PAD, padded=True)
    assert batch.input_ids.tolist() == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert batch.padding_mask is None
    # rows of the hidden states [5 tokens, 2 rows]
    assert batch.token_rows.tolist() == [2 * 2, 3 * 2, 1 * 2 + 1, 2 * 2 + 1, 3 * 2 + 1]


@pytest.mark.parametrize("padded", [False, True])
def test_a_batch_without_sequences_is_padding_of_the_common_shape(padded: bool) -> None:
    shape = BatchShape(3, 8) if padded else BatchShape(1, 24)
    batch = pack([], [], [], [], pad_id=PAD, padded=padded, shape=shape, multiple=2)
    assert batch.input_ids.shape == (shape.rows, shape.tokens)
    assert batch.padding_mask is not None and batch.padding_mask.all()
    assert len(batch.token_rows) == 0


@pytest.mark.parametrize("seed", range(4))
def test_packed_batch_filled_up_to_a_shape_predicts_the_same(seed: int) -> None:
    tokens, responses = random_sequences(seed)
    offsets = [sum(responses[:n]) for n in range(len(responses))]
    plain = pack(tokens, responses, offsets, [1, 2, 5], pad_id=PAD, multiple=2)
    total = plain.input_ids.shape[1] + 14
    filled = pack(
        tokens, responses, offsets, [1, 2, 5], pad_id=PAD, multiple=2, shape=BatchShape(1, total)
    )
    assert filled.input_ids.shape == (1, total)
    assert torch.equal(filled.token_rows, plain.token_rows)
    assert torch.equal(filled.targets, plain.targets)
    assert filled.boundaries[-1] == total
    assert int(filled.padding_mask.sum()) == total - sum(len(tokens[n]) for n in [1, 2, 5])


@pytest.mark.parametrize("seed", range(10))
def test_split_padded_counts_padding_and_loses_nothing(seed: int) -> None:
    source = random.Random(seed)
    lengths = [source.randint(1, 90) for _ in range(source.randint(0, 60))]
    bins = split_padded(lengths, 64)
    assert sorted(n for members in bins for n in members) == list(range(len(lengths)))
    for members in bins:
        assert len(members) == 1 or len(members) * max(lengths[n] for n in members) <= 64
