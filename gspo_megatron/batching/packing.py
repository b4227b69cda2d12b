"""Packs or pads sequences into micro-batches and cuts them for context-parallel ranks.

A packed micro-batch is one row of tokens [1, tokens] with the boundaries of its sequences
(Megatron's THD layout). A padded micro-batch has a row for each branch. Every rank of a model
replica builds the same plan. Then context-parallel rank r takes its zig-zag shard of each sequence:
the chunks r and 2CP-1-r of 2CP.

The model sees each branch of an episode as a separate sequence with positions from 0. The loss
sees all branches of an episode as one sequence.

A packed micro-batch can hold the common beginning of several branches once, such as a prompt or a
chat template: see `_find_shared`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from gspo_megatron.models.shared_prompts import SharedPrompts

# The least share of the tokens that is worth sharing. Attention repeats the keys of shared tokens,
# which takes time and memory.
LEAST_SAVED = 0.05
# [sequence number][branch]: numbers of prompt and response tokens
Branches = Sequence[Sequence[tuple[int, int]]]


@dataclass(frozen=True)
class BatchShape:
    """Size of a micro-batch before the cut for context-parallel ranks."""

    rows: int  # 1 if branches are packed
    tokens: int  # in each row


@dataclass
class PackedBatch:
    """The part of a micro-batch that one rank holds.

    `token_rows` gives, for each local response token, the row of this rank's shard that predicts
    it. All per-token vectors, here and in the loss, have the same order.
    """

    input_ids: Tensor  # [rows, tokens / CP] int64
    position_ids: Tensor  # [rows, tokens / CP] int64
    # [branches + 1] int32, starts and end of padded branches before the CP cut; [2] with shared
    # prompts: start and end of the micro-batch
    boundaries: Tensor
    longest: int  # number of tokens of the longest branch, with its padding
    padding_mask: Tensor | None  # [rows, tokens / CP] bool, True on padding; None: no padding
    # [rows, tokens / CP] int64, index into the concatenated tokens of the members; -1: padding
    token_index: Tensor
    # [response tokens] int64, index into the hidden states, flattened from [tokens / CP, rows]
    token_rows: Tensor
    targets: Tensor  # [response tokens] int64
    sequence_index: Tensor  # [response tokens] int64
    response_index: Tensor  # [response tokens] int64, index into the flat responses
    response_lengths: Tensor  # [sequences] int64, of whole sequences, not of this shard
    members: tuple[int, ...]  # the micro-batch's sequences, by their numbers in the rank's batch
    shared: SharedPrompts | None = None  # None: every branch has all its tokens

    def forget_angles(self) -> None:
        """Free the rotary angles at the end of a pass. All micro-batches of a step exist together,
        and each pass can make them again."""
        vars(self.boundaries).pop("rotary_tables", None)  # see platform/cpu/faster.py
        if self.shared is not None:
            self.shared.forget_angles()

    def to(self, device: torch.device) -> PackedBatch:
        """Return a copy with the tensors on `device`."""
        moved = {
            name: value.to(device, non_blocking=True) if isinstance(value, Tensor) else value
            for name, value in vars(self).items()
        }
        moved["shared"] = self.shared and self.shared.to(device)
        return PackedBatch(**moved)


@dataclass(frozen=True)
class PackSpec:
    """Settings that all micro-batches of a rank share."""

    pad_id: int
    padded: bool = False  # True: a row for each branch; False: all branches in one row
    context_parallel_size: int = 1
    context_parallel_rank: int = 0
    # A rank's number of tokens is a multiple of this value: TP with sequence parallelism, else 1.
    # For FP8 the value is multiplied by 16 or 32.
    multiple: int = 1
    share_prompts: bool = False  # a packed micro-batch holds shared prompts once; needs CP = 1
    scores: bool = False  # True: the model scores each branch at its last token

    @property
    def chunks(self) -> int:
        """The number of equal chunks into which context parallelism cuts a sequence."""
        return 2 * self.context_parallel_size if self.context_parallel_size > 1 else 1

    def smallest_shape(self, lengths: Sequence[int]) -> BatchShape:
        """Return the smallest shape that holds branches of these lengths."""
        unit = math.lcm(self.multiple * self.context_parallel_size, self.chunks)
        if self.padded:
            longest = max(lengths, default=1)
            return BatchShape(max(1, len(lengths)), -(-longest // unit) * unit)
        total = sum(-(-length // self.chunks) * self.chunks for length in lengths)
        return BatchShape(1, max(1, -(-total // unit)) * unit)


def pack(
    spec: PackSpec,
    tokens: Sequence[Tensor] | Mapping[int, Tensor],
    response_lengths: Sequence[int],
    response_offsets: Sequence[int] | Mapping[int, int],
    members: Sequence[int],
    *,
    shape: BatchShape | None = None,
    branches: Branches | None = None,
) -> PackedBatch:
    """Make one micro-batch from the sequences `members`. Each sequence is a prompt and its
    response.

    tokens: sequences by their number, [length] int64 each; response_offsets: where the response of
    each sequence starts in the rank's flat response vectors; shape: a larger shape to pad to, if
    all micro-batches need the same shape; branches: the lengths of each sequence's branches, in
    order, or None if each sequence is one branch. If `members` is empty, the batch holds only
    padding: a data-parallel rank without sequences needs such a batch to take part in the
    collectives.
    """
    pieces = _pieces(tokens, response_lengths, members, branches)
    nothing = torch.empty(0, dtype=torch.long)
    joined = torch.cat([tokens[number] for number in members]) if members else nothing
    if spec.share_prompts:
        pieces = _find_shared(pieces, joined, spec.scores)
    lengths = [piece.rows for piece in pieces]
    smallest = spec.smallest_shape(lengths)
    shape = shape or smallest
    assert smallest.rows <= shape.rows and smallest.tokens <= shape.tokens, (smallest, shape)
    boundaries = _boundaries(lengths, spec, shape)
    total = shape.rows * shape.tokens

    positions = _Positions.padding(total, spec.pad_id)
    positions.lay_out(pieces, boundaries, joined, [response_offsets[n] for n in members])
    if spec.context_parallel_size > 1:
        ranks = spec.context_parallel_size, spec.context_parallel_rank
        positions = positions.shard(zigzag_shard(boundaries, *ranks))

    longest = max(end - start for start, end in pairwise(boundaries))
    shared = None
    if any(piece.shared for piece in pieces):
        shared = _shared_prompts(pieces, boundaries, positions.position_ids)
        boundaries, longest = [0, total], shared.longest
    size = (shape.rows, shape.tokens // spec.context_parallel_size)
    return PackedBatch(
        input_ids=positions.ids.view(size),
        position_ids=positions.position_ids.view(size),
        boundaries=torch.tensor(boundaries, dtype=torch.int32),
        longest=longest,
        padding_mask=(positions.source < 0).view(size) if sum(lengths) < total else None,
        token_index=positions.source.view(size),
        response_lengths=torch.tensor([response_lengths[i] for i in members], dtype=torch.long),
        members=tuple(members),
        shared=shared,
        **positions.head_inputs(size),
    )


@dataclass
class _Positions:
    """Data for each position of a micro-batch, row after row; [positions] int64 each."""

    ids: Tensor
    position_ids: Tensor  # position in the branch
    source: Tensor  # index into the concatenated tokens of the members; -1: padding
    targets: Tensor  # the response token that this position predicts
    owner: Tensor  # the index in `members` of that token's sequence; -1: no token is predicted
    response_index: Tensor  # index of that token in the rank's flat response vectors

    @staticmethod
    def padding(total: int, pad_id: int) -> _Positions:
        """Return positions that hold only padding."""
        nothing = torch.full((total,), -1, dtype=torch.long)
        zeros = torch.zeros(total, dtype=torch.long)
        ids = torch.full((total,), pad_id, dtype=torch.long)
        return _Positions(ids, zeros, nothing, zeros.clone(), nothing.clone(), zeros.clone())

    def lay_out(
        self,
        pieces: Sequence[_Piece],
        boundaries: Sequence[int],
        joined: Tensor,
        offsets: list[int],
    ) -> None:
        """Write each branch, starting at its boundary.

        joined: the concatenated tokens of the members; offsets: where each member's response starts
        in the flat response vectors. The call advances `offsets`.
        """
        for piece, start in zip(pieces, boundaries):
            own = torch.arange(piece.shared, piece.length)  # positions in the branch
            rows = slice(start, start + piece.rows)
            self.ids[rows] = joined[piece.start + own]
            self.position_ids[rows] = own
            self.source[rows] = piece.start + own
            # Each token predicts the next token, so the last prompt token predicts the first
            # response token.
            first = start + piece.prompt - 1 - piece.shared
            rows = slice(first, first + piece.response)
            end = piece.start + piece.prompt + piece.response
            self.targets[rows] = joined[end - piece.response : end]
            self.owner[rows] = piece.place
            offset = offsets[piece.place]
            self.response_index[rows] = torch.arange(offset, offset + piece.response)
            offsets[piece.place] += piece.response

    def shard(self, held: Tensor) -> _Positions:
        """Return the positions with the indices `held`, in this order."""
        return _Positions(**{name: values[held] for name, values in vars(self).items()})

    def head_inputs(self, size: tuple[int, int]) -> dict[str, Tensor]:
        """Return the fields of PackedBatch that say which row predicts which token."""
        rows = (self.owner >= 0).nonzero()[:, 0]
        return {
            # The micro-batch is [rows, tokens], the hidden states are [tokens, rows].
            "token_rows": rows % size[1] * size[0] + rows // size[1],
            "targets": self.targets[rows],
            "sequence_index": self.owner[rows],
            "response_index": self.response_index[rows],
        }


def last_token_rows(packed: PackedBatch, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Find the last token of each branch among the tokens of this rank.

    lengths: the number of tokens of each branch of the members, in order. Returns two vectors: the
    rows of these tokens in the hidden states, flattened from [tokens / CP, rows], and the numbers
    of their branches. With context parallelism a rank has only some of the last tokens. Padding
    after a branch is not part of the branch.
    """
    ends = torch.tensor(lengths, device=packed.token_index.device).cumsum(0) - 1
    token_index = packed.token_index.flatten()
    places = torch.isin(token_index, ends).nonzero()[:, 0]
    rows, tokens = packed.token_index.shape
    return places % tokens * rows + places // tokens, torch.searchsorted(ends, token_index[places])


@dataclass(frozen=True)
class _Piece:
    """A branch, and which of its tokens get rows of their own in the micro-batch."""

    place: int  # the index of its sequence in `members`
    start: int  # where it starts in the concatenated tokens of the members
    prompt: int  # tokens
    response: int  # tokens
    length: int  # the number of its first tokens that the model computes
    shared: int = 0  # how many of these have the rows of the branch before it

    @property
    def rows(self) -> int:
        """The number of its own rows."""
        return self.length - self.shared


def _pieces(
    tokens: Sequence[Tensor] | Mapping[int, Tensor],
    response_lengths: Sequence[int],
    members: Sequence[int],
    branches: Branches | None,
) -> list[_Piece]:
    """Return the branches of the members, each with all its tokens."""
    pieces = []
    start = 0
    for place, number in enumerate(members):
        length, response = len(tokens[number]), response_lengths[number]
        own = [(length - response, response)] if branches is None else branches[number]
        assert sum(map(sum, own)) == length, "branches do not cover their sequence"
        for counts in own:
            pieces.append(_Piece(place, start, *counts, sum(counts)))
            start += sum(counts)
    assert all(piece.prompt > 0 for piece in pieces), "a response needs a prompt before it"
    return pieces


def _find_shared(pieces: Sequence[_Piece], joined: Tensor, scores: bool) -> Sequence[_Piece]:
    """Find the tokens that each branch has in common with the branch before it.

    Responses to a prompt are neighbours, so each prompt is computed once. The last prompt token
    stays in every branch: it predicts the first response token, and a row predicts one token. If
    tokens are shared, the last token of each branch is left out, because it predicts nothing.
    A preference model (`scores`) needs it, because it scores a branch at its last token.

    Nothing is shared if this would save less than LEAST_SAVED.
    """
    result: list[_Piece] = []
    for piece in pieces:
        shared = 0
        if result:
            previous = result[-1]
            most = min(previous.length, piece.prompt - 1)
            differ = joined[previous.start :][:most] != joined[piece.start :][:most]
            shared = int(differ.nonzero()[0]) if differ.any() else most
        length = piece.prompt + piece.response
        if not scores:
            length = max(length - 1, 1)
        result.append(replace(piece, length=length, shared=shared))
    saved = sum(piece.shared for piece in result)
    return result if saved > LEAST_SAVED * len(joined) else pieces


def _shared_prompts(
    pieces: Sequence[_Piece], boundaries: Sequence[int], positions: Tensor
) -> SharedPrompts:
    """Describe where the tokens of whole branches are. boundaries: where the own rows of each
    branch start; padding at the end counts as one more branch. positions: [rows]."""
    shares = [piece.shared for piece in pieces] + [0] * (len(boundaries) - 1 - len(pieces))
    whole: list[Tensor] = []
    ends, kept = [0], torch.empty(boundaries[-1], dtype=torch.long)
    for shared, (start, end) in zip(shares, pairwise(boundaries), strict=True):
        own = torch.arange(start, end)
        kept[start:end] = own - start + shared + ends[-1]
        whole.append(torch.cat([whole[-1][:shared], own]) if shared else own)
        ends.append(ends[-1] + len(whole[-1]))
    return SharedPrompts(
        rows=torch.cat(whole),
        kept=kept,
        positions=positions,
        boundaries=torch.tensor(ends, dtype=torch.int32),
        longest=max(map(len, whole)),
        skipped=shares,
    )


def _boundaries(lengths: Sequence[int], spec: PackSpec, shape: BatchShape) -> list[int]:
    """Return the start of each branch, and the end of the micro-batch.

    In a packed batch, the padding at the end counts as one more branch.
    """
    if spec.padded:
        return [row * shape.tokens for row in range(shape.rows + 1)]
    boundaries = [0]
    for length in lengths:
        boundaries.append(boundaries[-1] - (-length // spec.chunks) * spec.chunks)
    return boundaries if boundaries[-1] == shape.tokens else [*boundaries, shape.tokens]


def zigzag_shard(boundaries: Sequence[int], size: int, rank: int) -> Tensor:
    """Return the positions of a micro-batch that context-parallel rank `rank` holds, in the order
    in which it holds them."""
    pieces = []
    for start, end in zip(boundaries, boundaries[1:], strict=False):
        chunk = (end - start) // (2 * size)
        assert chunk * 2 * size == end - start, "sequences are padded to 2 * CP"
        for number in (rank, 2 * size - 1 - rank):
            pieces.append(torch.arange(start + number * chunk, start + (number + 1) * chunk))
    return torch.cat(pieces)
