"""Packing, compared with plain lists: the rows that predict tokens, the padding, and the cut for
context parallelism."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from gspo_megatron.batching.packing import (
    BatchShape,
    PackedBatch,
    PackSpec,
    pack,
    zigzag_shard,
)

PAD = 7


@dataclass
class Batch:
    tokens: list[Tensor]
    response_lengths: list[int]
    # A micro-batch holds only some of the rank's sequences, so its offsets can have gaps.
    response_offsets: list[int]
    flat_responses: list[int]

    def pack(self, members: list[int], shape: BatchShape | None = None, **spec: Any) -> PackedBatch:
        columns = self.tokens, self.response_lengths, self.response_offsets
        return pack(PackSpec(PAD, **spec), *columns, members, shape=shape)

    def predictions(self, members: list[int]) -> list[tuple[int, int, int, int, int]]:
        """The tuples (place, position, token before, target, flat index) of all response tokens."""
        expected = []
        for place, number in enumerate(members):
            sequence = self.tokens[number].tolist()
            prompt = len(sequence) - self.response_lengths[number]
            for step in range(self.response_lengths[number]):
                position = prompt + step - 1
                flat = self.response_offsets[number] + step
                expected.append((place, position, sequence[position], sequence[position + 1], flat))
        return expected


def random_batch(seed: int, count: int = 7, longest: int = 23) -> Batch:
    source = random.Random(seed)
    tokens, responses, offsets, flat = [], [], [], []
    for _ in range(count):
        response = source.choice([0, 1, source.randint(1, longest)])
        prompt = source.choice([1, source.randint(1, longest)])
        # Ids of 100 and above differ from the id of padding.
        sequence = [source.randint(100, 10_000) for _ in range(prompt + response)]
        offsets.append(len(flat))
        flat += sequence[prompt:]
        tokens.append(torch.tensor(sequence))
        responses.append(response)
    return Batch(tokens, responses, offsets, flat)


def predictions_of(packed: PackedBatch) -> list[tuple[int, int, int, int, int]]:
    """The predictions of one rank's shard. The batch is packed, or has one row for each
    sequence."""
    rows = packed.input_ids.shape[0]
    # Each index is into [tokens / CP, rows].
    step, row = packed.token_rows // rows, packed.token_rows % rows
    assert rows == 1 or torch.equal(row, packed.sequence_index)
    columns = (
        packed.sequence_index,
        packed.position_ids[row, step],
        packed.input_ids[row, step],
        packed.targets,
        packed.response_index,
    )
    return list(zip(*(column.tolist() for column in columns), strict=True))


@pytest.mark.parametrize("seed", range(6))
def test_rows_predict_the_response_tokens_in_order(seed: int) -> None:
    batch = random_batch(seed)
    members = random.Random(seed).sample(range(7), 1 + seed)
    packed = batch.pack(members)
    assert predictions_of(packed) == batch.predictions(members)
    assert [batch.flat_responses[i] for i in packed.response_index.tolist()] == (
        packed.targets.tolist()
    )
    joined = torch.cat([batch.tokens[i] for i in members])
    assert packed.input_ids[0].tolist() == joined.tolist()
    assert packed.position_ids[0].tolist() == [
        p for i in members for p in range(len(batch.tokens[i]))
    ]
    ends = torch.tensor([0] + [len(batch.tokens[i]) for i in members]).cumsum(0)
    assert packed.boundaries.tolist() == ends.tolist()
    assert packed.boundaries.dtype == torch.int32  # the type that attention kernels take
    assert packed.longest == max(len(batch.tokens[i]) for i in members)
    assert packed.response_lengths.tolist() == [batch.response_lengths[i] for i in members]
    assert packed.members == tuple(members)
    assert packed.padding_mask is None


@pytest.mark.parametrize("multiple", [2, 3, 8, 64])
def test_tokens_are_padded_to_the_multiple_as_a_sequence_of_their_own(multiple: int) -> None:
    batch, members = random_batch(11), [4, 0, 2]
    packed = batch.pack(members, multiple=multiple)
    real = sum(len(batch.tokens[i]) for i in members)
    total = math.ceil(real / multiple) * multiple
    assert packed.input_ids.shape == packed.position_ids.shape == (1, total)
    assert packed.boundaries.tolist()[-1] == total
    assert predictions_of(packed) == batch.predictions(members)
    if total == real:
        assert packed.padding_mask is None
        return
    assert packed.boundaries.tolist()[-2] == real
    assert packed.padding_mask.tolist() == [[False] * real + [True] * (total - real)]
    assert packed.input_ids[0, real:].tolist() == [PAD] * (total - real)


@pytest.mark.parametrize("cp", [2, 3, 4])
@pytest.mark.parametrize("multiple", [1, 2, 3, 8])
@pytest.mark.parametrize("seed", range(3))
def test_context_parallel_shards_hold_everything_once(cp: int, multiple: int, seed: int) -> None:
    batch = random_batch(100 + seed)
    members = random.Random(seed).sample(range(7), 4)
    shards = [
        batch.pack(members, multiple=multiple, context_parallel_size=cp, context_parallel_rank=rank)
        for rank in range(cp)
    ]
    together = sorted(p for shard in shards for p in predictions_of(shard))
    assert together == sorted(batch.predictions(members))

    padded = [math.ceil(len(batch.tokens[i]) / (2 * cp)) * 2 * cp for i in members]
    # A rank's tokens are whole chunks, and `multiple` divides their number.
    unit = math.lcm(multiple * cp, 2 * cp)
    total = math.ceil(sum(padded) / unit) * unit
    held = [
        (place, position, token)
        for shard in shards
        for place, position, token in real_tokens(shard, cp)
    ]
    expected = [
        (place, position, token)
        for place, i in enumerate(members)
        for position, token in enumerate(batch.tokens[i].tolist())
    ]
    assert sorted(held) == expected
    for shard in shards:
        assert shard.input_ids.shape[1] == total // cp
        assert shard.input_ids.shape[1] % multiple == 0
        assert shard.boundaries.tolist() == shards[0].boundaries.tolist()
        assert shard.boundaries.tolist()[-1] == total
        assert shard.response_lengths.tolist() == [batch.response_lengths[i] for i in members]


def real_tokens(shard: PackedBatch, cp: int) -> list[tuple[int, int, int]]:
    """The tuples (place, position, token) of a shard's rows that are not padding."""
    places = []
    for place, (start, end) in enumerate(zip(shard.boundaries, shard.boundaries[1:])):
        places += [place] * (int(end - start) // cp)
    is_padding = [False] * len(places)
    if shard.padding_mask is not None:
        is_padding = shard.padding_mask[0].tolist()
    rows = zip(
        places, shard.position_ids[0].tolist(), shard.input_ids[0].tolist(), is_padding, strict=True
    )
    return [row[:3] for row in rows if not row[3]]


@pytest.mark.parametrize("cp", [2, 3, 4, 8])
def test_shards_are_in_megatrons_zigzag_order(cp: int) -> None:
    source = random.Random(cp)
    boundaries = [0]
    for _ in range(5):
        boundaries.append(boundaries[-1] + 2 * cp * source.randint(0, 4))
    for rank in range(cp):
        # get_batch_on_this_cp_rank in megatron.core.utils cuts a sequence in the same way.
        pieces = [
            torch.arange(start, end).view(2 * cp, -1)[[rank, 2 * cp - 1 - rank]].flatten()
            for start, end in zip(boundaries, boundaries[1:])
        ]
        assert zigzag_shard(boundaries, cp, rank).tolist() == torch.cat(pieces).tolist()


def test_a_sequence_without_padding_needs_no_mask_on_any_shard() -> None:
    tokens = [torch.arange(100, 108), torch.arange(200, 204)]
    for rank in range(2):
        spec = PackSpec(PAD, context_parallel_size=2, context_parallel_rank=rank, multiple=2)
        packed = pack(spec, tokens, [3, 1], [0, 3], [0, 1])
        assert packed.padding_mask is None
        assert packed.input_ids.shape == (1, 6)


@pytest.mark.parametrize(("cp", "multiple"), [(1, 1), (1, 4), (2, 1), (2, 4), (3, 2), (4, 3)])
def test_an_empty_micro_batch_is_padding_only(cp: int, multiple: int) -> None:
    for rank in range(cp):
        place = {"context_parallel_size": cp, "context_parallel_rank": rank}
        packed = pack(PackSpec(PAD, multiple=multiple, **place), [], [], [], [])
        local = packed.input_ids.shape[1]
        assert local >= 1 and local % multiple == 0
        assert packed.boundaries.tolist() == [0, local * cp]
        assert packed.longest == local * cp
        assert packed.padding_mask.all() and (packed.input_ids == PAD).all()
        for vector in (packed.token_rows, packed.targets, packed.sequence_index):
            assert vector.numel() == 0 and vector.dtype == torch.long
        assert packed.response_lengths.numel() == 0 and packed.members == ()


def test_a_response_without_prompt_is_refused() -> None:
    with pytest.raises(AssertionError, match="prompt"):
        pack(PackSpec(PAD), [torch.tensor([41, 42])], [2], [0], [0])


def test_to_moves_the_tensors_and_keeps_the_rest() -> None:
    packed = random_batch(3).pack([1, 5], multiple=4)
    moved = packed.to(torch.device("meta"))
    assert moved.input_ids.is_meta and moved.padding_mask.is_meta and moved.token_rows.is_meta
    assert (moved.longest, moved.members) == (packed.longest, (1, 5))


# --- Padded: a row for each sequence; and micro-batches of one shape for all ----------------------


@pytest.mark.parametrize("cp", [1, 2, 3])
@pytest.mark.parametrize("multiple", [1, 2, 3])
@pytest.mark.parametrize("extra", [None, (2, 36), (0, 72)])
def test_padded_shards_predict_every_response_token_once(
    cp: int, multiple: int, extra: tuple[int, int] | None
) -> None:
    batch, members = random_batch(10 * cp + multiple), [4, 0, 3]
    lengths = [len(batch.tokens[n]) for n in members]
    options: dict[str, Any] = {"padded": True, "context_parallel_size": cp, "multiple": multiple}
    shape = PackSpec(PAD, **options).smallest_shape(lengths)
    if extra is not None:
        shape = BatchShape(shape.rows + extra[0], shape.tokens + extra[1])
    filled = shape if extra else None
    shards = [batch.pack(members, filled, context_parallel_rank=r, **options) for r in range(cp)]
    together = sorted(p for shard in shards for p in predictions_of(shard))
    assert together == sorted(batch.predictions(members))
    for shard in shards:
        assert shard.input_ids.shape == shard.position_ids.shape
        assert shard.input_ids.shape == (shape.rows, shape.tokens // cp)
        assert shard.input_ids.shape[1] % multiple == 0
        assert shard.padding_mask.shape == shard.input_ids.shape
        assert (shard.input_ids[shard.padding_mask] == PAD).all()
    assert sum(int((~shard.padding_mask).sum()) for shard in shards) == sum(lengths)


@pytest.mark.parametrize("seed", range(4))
def test_packed_batch_filled_up_to_a_shape_predicts_the_same(seed: int) -> None:
    batch, members = random_batch(seed), [1, 2, 5]
    plain = batch.pack(members, multiple=2)
    total = plain.input_ids.shape[1] + 14
    filled = batch.pack(members, multiple=2, shape=BatchShape(1, total))
    assert filled.input_ids.shape == (1, total)
    assert predictions_of(filled) == predictions_of(plain)
    assert filled.boundaries[-1] == total
    assert int(filled.padding_mask.sum()) == total - sum(len(batch.tokens[n]) for n in members)


def test_rows_of_equal_length_have_no_padding() -> None:
    tokens = [torch.arange(5), torch.arange(5, 10)]
    batch = pack(PackSpec(PAD, padded=True), tokens, [2, 3], [0, 2], [0, 1])
    assert batch.input_ids.tolist() == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert batch.padding_mask is None
    # These are rows of the flattened hidden states [5 tokens, 2 rows].
    assert batch.token_rows.tolist() == [2 * 2, 3 * 2, 1 * 2 + 1, 2 * 2 + 1, 3 * 2 + 1]


@pytest.mark.parametrize("padded", [False, True])
def test_a_batch_without_sequences_is_padding_of_the_common_shape(padded: bool) -> None:
    shape = BatchShape(3, 8) if padded else BatchShape(1, 24)
    batch = pack(PackSpec(PAD, padded, multiple=2), [], [], [], [], shape=shape)
    assert batch.input_ids.shape == (shape.rows, shape.tokens)
    assert batch.padding_mask is not None and batch.padding_mask.all()
    assert len(batch.token_rows) == 0


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize(("cp", "rank"), [(1, 0), (2, 0), (2, 1)])
def test_branches_are_packed_as_sequences_of_their_own(padded: bool, cp: int, rank: int) -> None:
    """A branch is packed like a separate sequence. Only `sequence_index` names the episode, because
    the loss has one sequence number for all branches of an episode."""
    place = {"padded": padded, "context_parallel_size": cp, "context_parallel_rank": rank}
    apart = random_batch(7)
    # The owner of each branch. An owner's branches are in this order.
    owners = [1, 1, 1, 0, 2, 2, 0]
    order = sorted(range(7), key=lambda number: owners[number])
    expected = apart.pack(order, **place)
    tokens, branches, offsets, responses = [], [], [], []
    for owner in range(3):
        own = [number for number in range(7) if owners[number] == owner]
        tokens.append(torch.cat([apart.tokens[number] for number in own]))
        lengths = [apart.response_lengths[number] for number in own]
        branches.append([(len(apart.tokens[n]) - own, own) for n, own in zip(own, lengths)])
        offsets.append(sum(responses))
        responses.append(sum(lengths))
    columns = tokens, responses, offsets
    found = pack(PackSpec(PAD, **place), *columns, [0, 1, 2], branches=branches)
    alike = ("input_ids", "position_ids", "boundaries", "token_index", "token_rows", "targets")
    for name in alike:
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    assert found.longest == expected.longest and found.members == (0, 1, 2)
    assert found.response_lengths.tolist() == responses
    of_branch = torch.tensor([owners[number] for number in order])
    assert torch.equal(found.sequence_index, of_branch[expected.sequence_index])
    # The responses of an owner's branches are joined into one vector.
    starts = torch.tensor([apart.response_lengths[n] for n in order]).cumsum(0)
    starts -= torch.tensor([apart.response_lengths[n] for n in order])
    within = (
        expected.response_index
        - torch.tensor([apart.response_offsets[n] for n in order])[expected.sequence_index]
    )
    assert torch.equal(found.response_index, starts[expected.sequence_index] + within)


# --- Prompts that several responses share ---------------------------------------------------------


def grouped_batch(seed: int, groups: int = 3, size: int = 4, longest: int = 23) -> Batch:
    """Several responses to each prompt. Ids are few, so responses begin alike by chance."""
    source = random.Random(seed)
    tokens, responses, offsets, flat = [], [], [], []
    for number in range(groups):
        length = source.choice([1, 2, longest]) if number else longest
        prompt = [source.randint(100, 101) for _ in range(length)]
        for _ in range(size):
            response = [
                source.randint(100, 102) for _ in range(source.choice([0, 1, source.randint(1, 9)]))
            ]
            offsets.append(len(flat))
            flat += response
            tokens.append(torch.tensor(prompt + response))
            responses.append(len(response))
    return Batch(tokens, responses, offsets, flat)


@pytest.mark.parametrize("multiple", [1, 8])
@pytest.mark.parametrize("seed", range(12))
def test_a_shared_prompt_is_there_once(seed: int, multiple: int) -> None:
    batch, members = grouped_batch(seed), [*range(9), 11]
    packed = batch.pack(members, share_prompts=True, multiple=multiple)
    expected = batch.predictions(members)
    assert predictions_of(packed) == expected
    assert [batch.flat_responses[i] for i in packed.response_index.tolist()] == (
        packed.targets.tolist()
    )

    shared, (total,) = packed.shared, packed.input_ids.shape[1:]
    assert shared is not None and packed.boundaries.tolist() == [0, total]
    real = int((packed.token_index >= 0).sum())
    if packed.padding_mask is None:
        assert real == total
    else:
        assert packed.padding_mask[0].tolist() == [False] * real + [True] * (total - real)
    # The last token of a sequence predicts nothing. So it needs no row.
    whole = [batch.tokens[i][: max(len(batch.tokens[i]) - 1, 1)].tolist() for i in members]
    rows = [batch.tokens[members[0]][: len(whole[0])]]  # the rows that are needed, in order
    for before, number, tokens in zip(whole, members[1:], whole[1:], strict=False):
        prompt = len(batch.tokens[number]) - batch.response_lengths[number]
        equal = 0
        while equal < min(len(before), prompt - 1) and before[equal] == tokens[equal]:
            equal += 1
        rows.append(batch.tokens[number][equal : len(tokens)])
    needed = torch.cat(rows)
    assert total == -(-len(needed) // multiple) * multiple
    assert packed.input_ids[0, : len(needed)].tolist() == needed.tolist()

    # each whole sequence, token after token, by the rows of the micro-batch
    ends = shared.boundaries.tolist()
    assert shared.longest == max(map(len, whole)) == packed.longest
    for start, end, tokens in zip(ends, ends[1:], whole, strict=False):
        held = shared.rows[start:end]
        assert packed.input_ids[0, held].tolist() == tokens
        assert packed.position_ids[0, held].tolist() == list(range(len(tokens)))
    assert torch.equal(shared.rows[shared.kept], torch.arange(total))
    assert torch.equal(shared.positions, packed.position_ids[0])
    joined = torch.cat([batch.tokens[i] for i in members])
    held = packed.token_index[0] >= 0
    assert torch.equal(joined[packed.token_index[0, held]], packed.input_ids[0, held])
    assert real == len(needed)


@pytest.mark.parametrize("prompt", [1, 2, 8])
def test_a_micro_batch_with_hardly_a_shared_token_is_as_before(prompt: int) -> None:
    """Less than a twentieth of the tokens is shared: 0, 1 or 7 of each response after the first."""
    tokens = [torch.cat([torch.full((prompt,), 100), torch.full((150,), 200)]) for _ in range(5)]
    batch, members = Batch(tokens, [150] * 5, [150 * n for n in range(5)], []), range(5)
    for mine, other in zip(
        vars(batch.pack(members, share_prompts=True)).values(),
        vars(batch.pack(members)).values(),
        strict=True,
    ):
        assert torch.equal(mine, other) if isinstance(mine, Tensor) else mine == other
