"""Sequences into micro-batches: packed end to end up to a token budget, cut for CP ranks.

A micro-batch is one row of tokens [1, tokens] with the boundaries of its sequences (Megatron's THD
layout). Every rank of a model replica builds the same plan; a context-parallel rank then takes its
zig-zag shard of each sequence: chunks r and 2CP-1-r of 2CP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class PackedBatch:
    """One micro-batch as one rank holds it.

    `token_rows` says which row of this rank's shard predicts each local response token, in the
    order of `sequence_index`; all per-token vectors of the loss follow that order.
    """

    input_ids: Tensor  # [1, tokens / CP] int64
    position_ids: Tensor  # [1, tokens / CP] int64
    boundaries: Tensor  # [sequences + 1] int32, of the padded sequences before the CP cut
    longest: int  # tokens of the longest padded sequence
    padding_mask: Tensor | None  # [1, tokens / CP] bool, True on padding; None without any
    token_rows: Tensor  # [response tokens] int64
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


def split_by_budget(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Sequences into as few micro-batches as the token budget allows (first fit, longest first).

    A sequence longer than the budget gets a micro-batch of its own. Deterministic in `lengths`.
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        place = next((b for b, free in enumerate(room) if free >= length), None)
        if place is None:
            bins.append([])
            room.append(max(budget, length))
            place = len(bins) - 1
        bins[place].append(index)
        room[place] -= length
    return [sorted(members) for members in bins]


def split_evenly(lengths: Sequence[int], parts: int) -> list[list[int]]:
    """Sequences into exactly `parts` groups of nearly equal token counts (longest first, to the
    lightest group); groups may be empty when there are fewer sequences than parts."""
    groups: list[list[int]] = [[] for _ in range(parts)]
    loads = [0] * parts
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        lightest = min(range(parts), key=lambda g: (loads[g], len(groups[g]), g))
        groups[lightest].append(index)
        loads[lightest] += lengths[index]
    return [sorted(members) for members in groups]


def level(lengths: Sequence[int], bins: Sequence[list[int]], count: int) -> list[list[int]]:
    """`bins` of sequence numbers made into `count` of them, by halving the heaviest again and
    again; empty ones where nothing is left to halve. No bin gets heavier than it was."""
    bins = list(bins)
    while len(bins) < count:
        divisible = [members for members in bins if len(members) > 1]
        if not divisible:
            return bins + [[] for _ in range(count - len(bins))]
        heaviest = max(divisible, key=lambda members: sum(lengths[i] for i in members))
        bins.remove(heaviest)
        halves = split_evenly([lengths[i] for i in heaviest], 2)
        bins += [[heaviest[i] for i in half] for half in halves]
    return bins


def pack(
    tokens: Sequence[Tensor],
    response_lengths: Sequence[int],
    response_offsets: Sequence[int],
    members: Sequence[int],
    *,
    pad_id: int,
    context_parallel_size: int = 1,
    context_parallel_rank: int = 0,
    multiple: int = 1,
) -> PackedBatch:
    """Pack the sequences `members`, each a prompt with its response at the end.

    Args:
        tokens: all sequences of the rank's batch, [length] int64 each.
        response_lengths: response tokens of each.
        response_offsets: where each one's response starts in the batch's flat response vectors.
        members: the sequences that go into this micro-batch; none gives a batch of padding, which
            a data-parallel rank without sequences needs to take part in the collectives.
        multiple: this rank's tokens are padded to a multiple of it (TP under sequence parallelism).
    """
    cp, rank = context_parallel_size, context_parallel_rank
    chunk_unit = 2 * cp if cp > 1 else 1
    layout = _Layout(tokens, response_lengths, response_offsets, members, chunk_unit)
    unit = multiple * cp
    unit = unit if cp == 1 or unit % chunk_unit == 0 else unit * 2
    padding = -layout.total % unit
    if layout.total + padding == 0:
        padding = max(unit, chunk_unit)
    total = layout.total + padding
    boundaries = [*layout.boundaries, total] if padding else layout.boundaries

    ids = torch.full((total,), pad_id, dtype=torch.long)
    positions = torch.zeros(total, dtype=torch.long)
    targets = torch.zeros(total, dtype=torch.long)
    owner = torch.full((total,), -1, dtype=torch.long)
    flat = torch.zeros(total, dtype=torch.long)
    is_padding = torch.ones(total, dtype=torch.bool)
    for place, start in enumerate(layout.boundaries[:-1]):
        sequence = tokens[members[place]]
        length, response = len(sequence), response_lengths[members[place]]
        ids[start : start + length] = sequence
        positions[start : start + length] = torch.arange(length)
        is_padding[start : start + length] = False
        # the token before predicts: the row of the last prompt token is the first response row
        first = start + length - response - 1
        rows = slice(first, first + response)
        targets[rows] = sequence[length - response :]
        owner[rows] = place
        offset = response_offsets[members[place]]
        flat[rows] = torch.arange(offset, offset + response)

    if cp > 1:
        shard = zigzag_shard(boundaries, cp, rank)
        ids, positions, targets, owner, flat, is_padding = (
            vector[shard] for vector in (ids, positions, targets, owner, flat, is_padding)
        )
    rows = (owner >= 0).nonzero()[:, 0]
    return PackedBatch(
        input_ids=ids[None],
        position_ids=positions[None],
        boundaries=torch.tensor(boundaries, dtype=torch.int32),
        longest=max(end - start for start, end in zip(boundaries, boundaries[1:], strict=False)),
        padding_mask=is_padding[None] if layout.filled < total else None,
        token_rows=rows,
        targets=targets[rows],
        sequence_index=owner[rows],
        response_index=flat[rows],
        response_lengths=torch.tensor([response_lengths[i] for i in members], dtype=torch.long),
        members=tuple(members),
    )


class _Layout:
    """Where each sequence starts once padded to what the CP cut needs."""

    def __init__(
        self,
        tokens: Sequence[Tensor],
        response_lengths: Sequence[int],
        response_offsets: Sequence[int],
        members: Sequence[int],
        chunk_unit: int,
    ) -> None:
        assert len(tokens) == len(response_lengths) == len(response_offsets)
        self.boundaries = [0]
        for index in members:
            length = len(tokens[index])
            assert 0 <= response_lengths[index] < length, "a response needs a prompt before it"
            self.boundaries.append(self.boundaries[-1] - (-length // chunk_unit) * chunk_unit)
        self.total = self.boundaries[-1]
        self.filled = sum(len(tokens[index]) for index in members)


def zigzag_shard(boundaries: Sequence[int], size: int, rank: int) -> Tensor:
    """Which rows of a packed batch context-parallel rank `rank` holds, in its order."""
    pieces = []
    for start, end in zip(boundaries, boundaries[1:], strict=False):
        chunk = (end - start) // (2 * size)
        assert chunk * 2 * size == end - start, "sequences are padded to 2 * CP"
        for number in (rank, 2 * size - 1 - rank):
            pieces.append(torch.arange(start + number * chunk, start + (number + 1) * chunk))
    return torch.cat(pieces)
