"""Sequences into micro-batches, packed or padded, and their cut for context-parallel ranks.

A packed micro-batch is one row of tokens [1, tokens] with the boundaries of its sequences
(Megatron's THD layout); a padded one has a row for each sequence. Every rank of a model replica
builds the same plan; a context-parallel rank then takes its zig-zag shard of each sequence: chunks
r and 2CP-1-r of 2CP.

To the model each branch of an episode is a sequence of its own, at positions from 0; to the loss
all of them are one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Prompt and response tokens of each branch, of sequences by their number
Branches = Sequence[Sequence[tuple[int, int]]]


@dataclass(frozen=True)
class BatchShape:
    """Size of a micro-batch with the shards of all context-parallel ranks together."""

    rows: int  # 1 where sequences are packed
    tokens: int  # of a row


@dataclass
class PackedBatch:
    """One micro-batch as one rank holds it.

    `token_rows` says which row of this rank's shard predicts each local response token, in the
    order of `sequence_index`; all per-token vectors of the loss follow that order.
    """

    input_ids: Tensor  # [rows, tokens / CP] int64
    position_ids: Tensor  # [rows, tokens / CP] int64
    boundaries: Tensor  # [branches + 1] int32, of the padded branches before the CP cut
    longest: int  # tokens of the longest padded branch
    padding_mask: Tensor | None  # [rows, tokens / CP] bool, True on padding; None without any
    token_index: Tensor  # [rows, tokens / CP] int64, into the members' tokens joined; -1: padding
    token_rows: Tensor  # [response tokens] int64, into hidden states [tokens / CP, rows] flattened
    targets: Tensor  # [response tokens] int64
    sequence_index: Tensor  # [response tokens] int64
    response_index: Tensor  # [response tokens] int64, into the flat responses of `members`
    response_lengths: Tensor  # [sequences] int64, whole, not this shard's
    members: tuple[int, ...]  # which sequences of the rank's batch these are

    def to(self, device: torch.device) -> PackedBatch:
        """The same on a device; what only the host reads stays there."""
        moved = {
            name: value.to(device, non_blocking=True) if isinstance(value, Tensor) else value
            for name, value in vars(self).items()
        }
        return PackedBatch(**moved)


def batch_shape(
    lengths: Sequence[int], *, padded: bool, context_parallel_size: int = 1, multiple: int = 1
) -> BatchShape:
    """The smallest shape that holds branches of these lengths. A rank's tokens are a multiple of
    `multiple` (TP under sequence parallelism, times 16 or 32 in FP8)."""
    chunks = 2 * context_parallel_size if context_parallel_size > 1 else 1
    unit = math.lcm(multiple * context_parallel_size, chunks)
    if padded:
        longest = max(lengths, default=1)
        return BatchShape(max(1, len(lengths)), -(-longest // unit) * unit)
    total = sum(-(-length // chunks) * chunks for length in lengths)
    return BatchShape(1, max(1, -(-total // unit)) * unit)


def pack(
    tokens: Sequence[Tensor] | Mapping[int, Tensor],
    response_lengths: Sequence[int],
    response_offsets: Sequence[int] | Mapping[int, int],
    members: Sequence[int],
    *,
    pad_id: int,
    padded: bool = False,
    context_parallel_size: int = 1,
    context_parallel_rank: int = 0,
    multiple: int = 1,
    shape: BatchShape | None = None,
    branches: Branches | None = None,
) -> PackedBatch:
    """Make one micro-batch of the sequences `members`, each a prompt with its response at the end.

    tokens: sequences by their number, [length] int64 each; response_offsets: where each one's
    response starts in the rank's flat response vectors; shape: a larger one to pad to, where all
    micro-batches must be alike; branches: of each sequence, end to end; None: one of each. Without
    members the batch is padding: a data-parallel rank without sequences needs it to take part in
    the collectives.
    """
    cp, rank = context_parallel_size, context_parallel_rank
    pieces = _pieces(tokens, response_lengths, members, branches)
    lengths = [prompt + response for _, prompt, response in pieces]
    smallest = batch_shape(lengths, padded=padded, context_parallel_size=cp, multiple=multiple)
    shape = shape or smallest
    assert smallest.rows <= shape.rows and smallest.tokens <= shape.tokens, (smallest, shape)
    boundaries = _boundaries(lengths, padded, 2 * cp if cp > 1 else 1, shape)
    total = shape.rows * shape.tokens

    ids = torch.full((total,), pad_id, dtype=torch.long)
    positions = torch.zeros(total, dtype=torch.long)
    targets = torch.zeros(total, dtype=torch.long)
    owner = torch.full((total,), -1, dtype=torch.long)
    flat = torch.zeros(total, dtype=torch.long)
    source = torch.full((total,), -1, dtype=torch.long)
    joined = torch.cat([tokens[number] for number in members]) if members else ids[:0]
    offsets = [response_offsets[number] for number in members]
    passed = 0
    for (place, prompt, response), start in zip(pieces, boundaries):
        length = prompt + response
        taken = torch.arange(passed, passed + length)
        ids[start : start + length] = joined[taken]
        positions[start : start + length] = torch.arange(length)
        source[start : start + length] = taken
        passed += length
        # the token before predicts: the row of the last prompt token is the first response row
        first = start + prompt - 1
        rows = slice(first, first + response)
        targets[rows] = joined[taken[prompt:]]
        owner[rows] = place
        flat[rows] = torch.arange(offsets[place], offsets[place] + response)
        offsets[place] += response

    if cp > 1:
        shard = zigzag_shard(boundaries, cp, rank)
        ids, positions, targets, owner, flat, source = (
            vector[shard] for vector in (ids, positions, targets, owner, flat, source)
        )
    size = (shape.rows, shape.tokens // cp)
    rows = (owner >= 0).nonzero()[:, 0]
    return PackedBatch(
        input_ids=ids.view(size),
        position_ids=positions.view(size),
        boundaries=torch.tensor(boundaries, dtype=torch.int32),
        longest=max(end - start for start, end in zip(boundaries, boundaries[1:], strict=False)),
        padding_mask=(source < 0).view(size) if sum(lengths) < total else None,
        token_index=source.view(size),
        # hidden states come with the tokens of a row first: [tokens, rows]
        token_rows=rows % size[1] * size[0] + rows // size[1],
        targets=targets[rows],
        sequence_index=owner[rows],
        response_index=flat[rows],
        response_lengths=torch.tensor([response_lengths[i] for i in members], dtype=torch.long),
        members=tuple(members),
    )


def _pieces(
    tokens: Sequence[Tensor] | Mapping[int, Tensor],
    response_lengths: Sequence[int],
    members: Sequence[int],
    branches: Branches | None,
) -> list[tuple[int, int, int]]:
    """Of each branch the place of its sequence in `members`, and prompt and response tokens."""
    pieces = []
    for place, number in enumerate(members):
        length, response = len(tokens[number]), response_lengths[number]
        own = [(length - response, response)] if branches is None else branches[number]
        assert sum(map(sum, own)) == length, "branches are not all of their sequence"
        pieces += [(place, *lengths) for lengths in own]
    assert all(prompt > 0 for _, prompt, _ in pieces), "a response needs a prompt before it"
    return pieces


def _boundaries(lengths: Sequence[int], padded: bool, chunks: int, shape: BatchShape) -> list[int]:
    """Where each sequence starts, and the end; what fills a packed batch up is a sequence too."""
    if padded:
        return [row * shape.tokens for row in range(shape.rows + 1)]
    boundaries = [0]
    for length in lengths:
        boundaries.append(boundaries[-1] - (-length // chunks) * chunks)
    return boundaries if boundaries[-1] == shape.tokens else [*boundaries, shape.tokens]


def zigzag_shard(boundaries: Sequence[int], size: int, rank: int) -> Tensor:
    """Which rows of a packed batch context-parallel rank `rank` holds, in its order."""
    pieces = []
    for start, end in zip(boundaries, boundaries[1:], strict=False):
        chunk = (end - start) // (2 * size)
        assert chunk * 2 * size == end - start, "sequences are padded to 2 * CP"
        for number in (rank, 2 * size - 1 - rank):
            pieces.append(torch.arange(start + number * chunk, start + (number + 1) * chunk))
    return torch.cat(pieces)
