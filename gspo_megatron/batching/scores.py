"""Scores of sequences by a preference model, on any layout."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from torch import Tensor

from gspo_megatron.batching.micro_batches import (
    MicroBatch,
    MicroBatchBuilder,
    head_outputs,
    micro_batch_multiple,
)
from gspo_megatron.batching.packing import BatchShape, last_token_rows
from gspo_megatron.batching.plan import level, split_by_budget, split_in_order, split_padded
from gspo_megatron.models.build import Policy
from gspo_megatron.models.score_head import ScoreInputs
from gspo_megatron.platform.collectives import maxima


def score_micro_batch(
    builder: MicroBatchBuilder,
    members: Sequence[int],
    tokens: Sequence[Tensor],
    branches: Sequence[Sequence[int]],
    shape: BatchShape | None = None,
) -> MicroBatch:
    """Build a micro-batch in which the score head scores every branch.

    members: the numbers of the sequences in the micro-batch. A preference is one sequence. Its
    branches are the responses that it compares, so all these responses are in one micro-batch.
    tokens: for each member, the tokens of its branches, end to end. branches: by sequence number,
    the number of tokens of each branch."""
    nothing = [0] * len(members)
    parts = {n: [(length, 0) for length in branches[n]] for n in members}
    built = builder.build(
        members,
        dict(zip(members, tokens, strict=True)),
        dict(zip(members, nothing)),  # ty: ignore[invalid-argument-type]
        dict(zip(members, nothing)),
        shape,
        parts,  # ty: ignore[invalid-argument-type]
    )
    lengths = list(itertools.chain.from_iterable(branches[n] for n in members))
    rows, numbers = last_token_rows(built.packed, lengths)
    packed = replace(built.packed, token_rows=rows, sequence_index=numbers)
    return replace(built, packed=packed, head=ScoreInputs(rows))


def all_scores(local: Tensor, micro_batch: MicroBatch, count: int) -> Tensor:
    """Return the scores of all `count` branches of a micro-batch, [count]. local: the scores of the
    branches whose last token is in this rank's shard.

    The gradient of a score goes back only to the rank that has the last token of the branch. All
    context-parallel ranks compute the same loss from the scores, and their gradients are summed."""
    placed = local.new_zeros(count).index_copy(0, micro_batch.packed.sequence_index, local)
    group = parallel_state.get_context_parallel_group()
    # its name says tensor parallel, but it sums over any group
    return reduce_from_tensor_model_parallel_region(placed, group=group)


def sequence_scores(
    policy: Policy,
    tokens: Tensor,
    lengths: Sequence[int],
    *,
    token_budget: int,
    padded: bool = False,
    share_prompts: bool = False,
) -> Tensor:
    """Score sequences without gradients. Every rank of the model replica gets the scores,
    [num_sequences] float32 on the device.

    tokens: [sum(lengths)] int64, the sequences of this data-parallel rank, end to end. Other
    data-parallel ranks have their own sequences, or no sequences. All ranks call this function
    together. token_budget: the largest number of tokens of a micro-batch on one rank.
    share_prompts: compute the common beginning of neighbouring sequences once."""
    device = torch.device(torch.cuda.current_device())
    builder = MicroBatchBuilder(policy, 0, 1.0, padded=padded, share_prompts=share_prompts)
    budget = token_budget * builder.spec.context_parallel_size
    if padded:
        bins = split_padded([[length] for length in lengths], budget)
    elif share_prompts:
        bins = split_in_order(lengths, budget)
    else:
        bins = split_by_budget(lengths, budget)
    multiple = micro_batch_multiple(policy)
    shapes = [builder.spec.smallest_shape([lengths[n] for n in own]) for own in bins]
    shapes.append(builder.spec.smallest_shape([]))
    largest = [len(bins), max(s.rows for s in shapes), max(s.tokens for s in shapes)]
    # experts of all ranks take part in each micro-batch
    most = maxima(largest, parallel_state.get_data_parallel_group())
    count = -(-max(most[0], 1) // multiple) * multiple
    shape = None if builder.shapes_vary else BatchShape(most[1], most[2])
    bins = level(list(lengths), bins, count)
    parts = tokens.cpu().split(list(lengths))
    branches = [[length] for length in lengths]
    batches = [score_micro_batch(builder, b, [parts[n] for n in b], branches, shape) for b in bins]
    scores = torch.zeros(len(lengths), dtype=torch.float32, device=device)
    for batch, output in zip(batches, head_outputs(policy, batches)):
        numbers = torch.tensor(batch.packed.members, dtype=torch.long, device=device)
        scores[numbers[batch.packed.sequence_index]] = output[0].float()
    group = parallel_state.get_context_parallel_group()
    if group.size() > 1:
        dist.all_reduce(scores, group=group)
    stages = parallel_state.get_pipeline_model_parallel_group()
    if stages.size() > 1:
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        dist.broadcast(scores, src=last, group=stages)
    return scores
