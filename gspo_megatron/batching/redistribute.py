"""Moves sequences from the ranks that sampled them to the ranks that train on them.

Each flat tensor moves in one all-to-all over the data-parallel (x context-parallel) group. No rank
receives sequences that it does not train on. Every rank knows all lengths, so ranks need not
exchange sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gspo_megatron.batching.plan import MiniBatch
from gspo_megatron.platform.collectives import all_gather_columns
from gspo_megatron.types import RolloutBatch


@dataclass(frozen=True)
class StepIndex:
    """Facts about all sequences of a step, in the order of their sample index. Every rank knows
    them."""

    source: tuple[int, ...]  # the data-parallel rank that sampled the sequence
    prompt_lengths: tuple[int, ...]
    response_lengths: tuple[int, ...]
    masked_lengths: tuple[int, ...]  # response tokens to learn from
    groups: tuple[int, ...]  # the number of the sequence's prompt in the step
    rewards: Tensor  # [num_sequences] float64
    # Prompt and response tokens of each branch of each sequence; None: each has a single branch.
    branches: tuple[tuple[tuple[int, int], ...], ...] | None = None
    teachers: tuple[int, ...] | None = None  # the number of the sequence's teacher; -1: no teacher

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(p + r for p, r in zip(self.prompt_lengths, self.response_lengths, strict=True))

    def branch_lengths(self) -> list[list[int]]:
        """Return for each sequence the tokens of each branch."""
        if self.branches is None:
            return [[length] for length in self.lengths]
        return [[p + r for p, r in branches] for branches in self.branches]

    def prompts(self) -> list[tuple[int, int]]:
        """Return for each sequence the number of its prompt, and the prompt's tokens."""
        if self.branches is None:
            lengths = self.prompt_lengths
        else:
            lengths = tuple(branches[0][0] for branches in self.branches)
        return list(zip(self.groups, lengths, strict=True))


@dataclass
class Sequences:
    """The sequences that this rank trains on, by their number in the step."""

    tokens: dict[int, Tensor]  # [length] int64 each, on the host
    rollout_logprobs: Tensor  # [response tokens] float32, sequence after sequence
    offsets: dict[int, int]  # where each sequence's response starts in `rollout_logprobs`
    # [response tokens] float32; None: tokens have no advantages of their own
    token_advantages: Tensor | None = None
    mask: Tensor | None = None  # [response tokens] float32, 1 on tokens to learn from; None: all
    teacher_logprobs: Tensor | None = None  # [response tokens] float32
    teacher_tokens: Tensor | None = None  # [response tokens, k] int32
    teacher_top_logprobs: Tensor | None = None  # [response tokens, k] float32
    routes: dict[int, Tensor] | None = None  # rollout's routes, [length, layers of this rank, k]


def gather_index(batch: RolloutBatch, rewards: Tensor, group: dist.ProcessGroup) -> StepIndex:
    """Gather the index of all sequences. The ranks exchange 48 bytes for each sequence, 24 for each
    branch, and 8 more for each sequence if there are several teachers.

    rewards: [num_sequences] float64, for this rank's `batch`.
    """
    masked = batch.response_lengths
    if batch.mask is not None:
        counts = torch.cat([batch.mask.new_zeros(1, dtype=torch.long), batch.mask.cumsum(0)])
        ends = batch.response_lengths.cumsum(0)
        masked = counts[ends] - counts[ends - batch.response_lengths]
    local = torch.stack(
        [
            batch.sample_index,
            batch.prompt_lengths,
            batch.response_lengths,
            masked,
            batch.group_index,
            rewards.double().view(torch.long),
            *([] if batch.teachers is None else [batch.teachers.long()]),
        ]
    )
    columns = all_gather_columns(local, group)
    rows = torch.cat(columns, dim=1).cpu()
    counts = torch.tensor([each.shape[1] for each in columns])
    source = torch.arange(len(columns)).repeat_interleave(counts)
    order = rows[0].argsort()
    samples, prompts, responses, masked, groups, bits, *teachers = rows[:, order]
    assert bool((samples[1:] > samples[:-1]).all()), "sample index used twice"
    return StepIndex(
        source=tuple(source[order].tolist()),
        prompt_lengths=tuple(prompts.tolist()),
        response_lengths=tuple(responses.tolist()),
        masked_lengths=tuple(masked.tolist()),
        groups=tuple(groups.tolist()),
        rewards=bits.contiguous().view(torch.float64),
        branches=None if batch.in_response is None else _gather_branches(batch, group),
        teachers=tuple(teachers[0].tolist()) if teachers else None,
    )


def branch_starts(batch: RolloutBatch) -> Tensor:
    """Return [tokens] bool, True on the first token of each branch.

    `batch.in_response` must be set.
    """
    assert batch.in_response is not None
    lengths = batch.prompt_lengths + batch.response_lengths
    starts = ~batch.in_response & batch.in_response.roll(1)
    starts[lengths.cumsum(0) - lengths] = True
    return starts


def _gather_branches(
    batch: RolloutBatch, group: dist.ProcessGroup
) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Return `branches` of StepIndex."""
    assert batch.in_response is not None
    starts = branch_starts(batch)
    of_token = starts.cumsum(0) - 1  # [tokens], the number of each token's branch
    lengths = batch.prompt_lengths + batch.response_lengths
    samples = batch.sample_index.repeat_interleave(lengths)[starts]
    totals = torch.zeros((2, len(samples)), dtype=torch.long, device=samples.device)
    for row, counted in enumerate((~batch.in_response, batch.in_response)):
        totals[row].index_add_(0, of_token, counted.long())
    columns = all_gather_columns(torch.stack([samples, *totals]), group)
    found: dict[int, list[tuple[int, int]]] = {}
    for sample, prompt, response in torch.cat(columns, dim=1).t().tolist():
        found.setdefault(sample, []).append((prompt, response))
    return tuple(tuple(found[sample]) for sample in sorted(found))


def redistribute(
    batch: RolloutBatch,
    index: StepIndex,
    plan: Sequence[MiniBatch],
    group: dist.ProcessGroup,
    *,
    context_parallel_size: int = 1,
    token_advantages: Tensor | None = None,
) -> Sequences:
    """Send each sequence to the ranks that train on it, and receive the sequences of this rank.

    plan: says which data-parallel rank trains on a sequence. All context-parallel ranks of that
    data-parallel rank get the sequence. group: data-parallel x context-parallel; the CP ranks of a
    data-parallel rank are neighbours in it. token_advantages: [response tokens of `batch`]; all
    ranks pass them, or no rank does.
    """
    me, size, cp = group.rank(), group.size(), context_parallel_size
    source, target = torch.tensor(index.source), _data_ranks(plan, len(index.source))
    lengths, responses = torch.tensor(index.lengths), torch.tensor(index.response_lengths)
    own = (source == me).nonzero()[:, 0]  # the sequences that this rank sampled
    row_of = torch.argsort(batch.sample_index).cpu()  # the row of each of `own` in `batch`
    # For each receiving rank: the places in `own` of the sequences that it gets.
    sent_to = [(target[own] == rank // cp).nonzero()[:, 0] for rank in range(size)]
    trained_here = (target == me // cp).nonzero()[:, 0]  # the sequences that this rank trains on
    received = trained_here[torch.argsort(source[trained_here], stable=True)]  # by sender
    received_from = [received[source[received] == rank] for rank in range(size)]

    def move(flat: Tensor, pieces: Tensor, sizes: Tensor) -> Tensor:
        """Send `flat`, which holds one piece for each local sequence, in the order of `batch`.

        pieces: the length of the piece of each local sequence; sizes: the length of the piece of
        each sequence of the step.
        """
        rows = _rows_of(row_of[torch.cat(sent_to)], pieces.cpu()).to(flat.device)
        send_counts = [int(sizes[own[numbers]].sum()) for numbers in sent_to]
        receive_counts = [int(sizes[numbers].sum()) for numbers in received_from]
        return _all_to_all(flat[rows], send_counts, receive_counts, group)

    move_tokens = partial(move, pieces=batch.prompt_lengths + batch.response_lengths, sizes=lengths)
    move_responses = partial(move, pieces=batch.response_lengths, sizes=responses)

    def numbered(pieces: Sequence[Any]) -> dict[int, Any]:
        return dict(zip(received.tolist(), pieces, strict=True))

    splits, ends = lengths[received].tolist(), responses[received].cumsum(0)
    mask = None if batch.mask is None else batch.mask.to(torch.uint8)  # gloo has no bool
    teacher, candidates = batch.teacher_logprobs, batch.teacher_tokens
    top = batch.teacher_top_logprobs
    return Sequences(
        tokens=numbered(move_tokens(batch.tokens).cpu().split(splits)),
        rollout_logprobs=move_responses(batch.rollout_logprobs),
        offsets=numbered((ends - responses[received]).tolist()),
        token_advantages=None if token_advantages is None else move_responses(token_advantages),
        mask=None if mask is None else move_responses(mask).float(),
        teacher_logprobs=None if teacher is None else move_responses(teacher),
        teacher_tokens=None if candidates is None else move_responses(candidates),
        teacher_top_logprobs=None if top is None else move_responses(top),
        routes=None if batch.routes is None else numbered(move_tokens(batch.routes).split(splits)),
    )


def _data_ranks(plan: Sequence[MiniBatch], count: int) -> Tensor:
    """Return for each of the `count` sequences the data-parallel rank that trains on it."""
    ranks = [0] * count
    for mini_batch in plan:
        for rank, micro_batches in enumerate(mini_batch.micro_batches):
            for number in chain.from_iterable(micro_batches):
                ranks[number] = rank
    return torch.tensor(ranks)


def _rows_of(chosen: Tensor, lengths: Tensor) -> Tensor:
    """Return the row numbers of the chosen pieces in a flat tensor. lengths: the length of each
    piece in the tensor."""
    starts, sizes = (lengths.cumsum(0) - lengths)[chosen], lengths[chosen]
    shifts = starts - (sizes.cumsum(0) - sizes)
    return torch.arange(int(sizes.sum())) + shifts.repeat_interleave(sizes)


def _all_to_all(
    outgoing: Tensor, send_counts: list[int], receive_counts: list[int], group: dist.ProcessGroup
) -> Tensor:
    if group.size() == 1:
        return outgoing
    # Routes of more than 256 experts are int16, which gloo and NCCL do not have.
    if outgoing.dtype is torch.int16:
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
