"""Move sequences from the ranks that sampled them to the ranks that train on them.

One all-to-all of flat tensors over the data-parallel (x context-parallel) group; nobody holds
sequences that it does not train on. Every rank knows all lengths, so no sizes are negotiated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from gspo_megatron.types import RolloutBatch


@dataclass(frozen=True)
class StepIndex:
    """What every rank knows of all sequences of a step, in the order of their sample index."""

    source: tuple[int, ...]  # the data rank that sampled it
    prompt_lengths: tuple[int, ...]
    response_lengths: tuple[int, ...]
    groups: tuple[int, ...]  # the prompt that it answers
    rewards: Tensor  # [num_sequences] float64

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(p + r for p, r in zip(self.prompt_lengths, self.response_lengths, strict=True))


@dataclass
class Sequences:
    """The sequences that this rank trains on, by their number in the step."""

    tokens: dict[int, Tensor]  # [length] int64 each
    logprobs: Tensor  # [response tokens] float32, mu, sequence after sequence
    offsets: dict[int, int]  # where each sequence's response starts in `logprobs`
    token_advantages: Tensor | None = None  # [response tokens] float32, where tokens have their own
    routes: dict[int, Tensor] | None = None  # [length, layers of this rank, k], of the rollout


def index_step(batch: RolloutBatch, rewards: Tensor, group: dist.ProcessGroup) -> StepIndex:
    """Gather what every rank has to know of all sequences: 40 bytes a sequence.

    `rewards` [num_sequences] float64 are those of this rank's `batch`.
    """
    local = torch.stack(
        [
            batch.sample_index,
            batch.prompt_lengths,
            batch.response_lengths,
            batch.group_index,
            rewards.double().view(torch.long),
        ]
    )
    counts = _gather_counts(local.shape[1], group, local.device)
    most = max(counts)
    padded = local.new_zeros((len(local), most))
    padded[:, : local.shape[1]] = local
    gathered = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(gathered, padded, group=group)
    rows = [
        (*row, rank)
        for rank, (columns, count) in enumerate(zip(gathered, counts, strict=True))
        for row in columns[:, :count].t().tolist()
    ]
    rows.sort()
    assert [row[0] for row in rows] == sorted({row[0] for row in rows}), "sample index used twice"
    bits = torch.tensor([row[4] for row in rows], dtype=torch.long)
    return StepIndex(
        source=tuple(row[5] for row in rows),
        prompt_lengths=tuple(row[1] for row in rows),
        response_lengths=tuple(row[2] for row in rows),
        groups=tuple(row[3] for row in rows),
        rewards=bits.view(torch.float64),
    )


def exchange(
    batch: RolloutBatch,
    index: StepIndex,
    destinations: Sequence[Sequence[int]],
    group: dist.ProcessGroup,
    token_advantages: Tensor | None = None,
) -> Sequences:
    """Send every sequence to the data ranks in `destinations[sequence]` (all CP ranks of one
    data-parallel rank), and receive this rank's own; `token_advantages` [response tokens] too,
    where there are any (on all ranks, then)."""
    me, size = group.rank(), group.size()
    mine = [number for number, source in enumerate(index.source) if source == me]
    order = torch.argsort(batch.sample_index).tolist()  # local rows in the order of `mine`
    token_starts = _starts((batch.prompt_lengths + batch.response_lengths).tolist())
    logprob_starts = _starts(batch.response_lengths.tolist())
    local = dict(zip(mine, order, strict=True))

    sends = [[number for number in mine if rank in destinations[number]] for rank in range(size)]
    arriving = [
        [n for n, source in enumerate(index.source) if source == rank and me in destinations[n]]
        for rank in range(size)
    ]

    def move(flat: Tensor, starts: list[int], lengths: Sequence[int]) -> Tensor:
        pieces = [
            flat[starts[local[n]] : starts[local[n]] + lengths[n]] for row in sends for n in row
        ]
        outgoing = torch.cat(pieces) if pieces else flat[:0]
        return _all_to_all(
            outgoing,
            [sum(lengths[n] for n in row) for row in sends],
            [sum(lengths[n] for n in row) for row in arriving],
            group,
        )

    lengths, responses = index.lengths, index.response_lengths
    tokens = move(batch.tokens, token_starts, lengths)
    logprobs = move(batch.logprobs, logprob_starts, responses)
    if token_advantages is not None:
        token_advantages = move(token_advantages, logprob_starts, responses)

    received = [n for row in arriving for n in row]
    routes = None
    if batch.routes is not None:
        moved = move(batch.routes, token_starts, lengths).split([lengths[n] for n in received])
        routes = dict(zip(received, moved, strict=True))
    splits = tokens.split([lengths[n] for n in received])
    starts = _starts([responses[n] for n in received])
    return Sequences(
        tokens={n: piece.cpu() for n, piece in zip(received, splits, strict=True)},
        logprobs=logprobs,
        offsets=dict(zip(received, starts, strict=False)),
        token_advantages=token_advantages,
        routes=routes,
    )


def _starts(lengths: Sequence[int]) -> list[int]:
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    return starts


def _gather_counts(count: int, group: dist.ProcessGroup, device: torch.device) -> list[int]:
    counts = torch.zeros(group.size(), dtype=torch.long, device=device)
    counts[group.rank()] = count
    dist.all_reduce(counts, group=group)
    return counts.tolist()


def _all_to_all(
    outgoing: Tensor, send_counts: list[int], receive_counts: list[int], group: dist.ProcessGroup
) -> Tensor:
    if group.size() == 1:
        return outgoing
    if outgoing.dtype is torch.int16:  # experts beyond 256; neither gloo nor NCCL knows the type
        as_bytes = outgoing.contiguous().view(torch.uint8)
        return _all_to_all(as_bytes, send_counts, receive_counts, group).view(torch.int16)
    incoming = outgoing.new_empty((sum(receive_counts), *outgoing.shape[1:]))
    dist.all_to_all_single(
        incoming,
        outgoing.contiguous(),
        output_split_sizes=receive_counts,
        input_split_sizes=send_counts,
        group=group,
    )
    return incoming
