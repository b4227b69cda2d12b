"""Who trains on which sequence, when: decided alike by every rank from the sequences' lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gspo_megatron.batching.packing import level, split_by_budget, split_evenly, split_padded


@dataclass(frozen=True)
class MiniBatch:
    """One optimizer update: for each data-parallel rank, its micro-batches of sequence numbers.

    All ranks have the same number of micro-batches; some may be empty.
    """

    micro_batches: tuple[tuple[tuple[int, ...], ...], ...]  # [data-parallel rank][micro-batch]
    num_sequences: int
    num_response_tokens: int

    @property
    def num_micro_batches(self) -> int:
        """Over all ranks, the empty ones left out."""
        return sum(bool(members) for rank in self.micro_batches for members in rank)

    def of_rank(self, data_parallel_rank: int) -> tuple[tuple[int, ...], ...]:
        return self.micro_batches[data_parallel_rank]


def largest_equal_share(count: int, most: int, multiple: int) -> int:
    """How many of `count` samples of one length make a micro-batch: as many as possible, `most` at
    most but one at least, so that all micro-batches have as many and their number is a multiple of
    `multiple`."""
    rounds = count // multiple
    return max(size for size in range(1, min(max(1, most), rounds) + 1) if rounds % size == 0)


def plan_step(
    lengths: Sequence[int],
    response_lengths: Sequence[int],
    *,
    mini_batches: int,
    data_parallel_size: int,
    token_budget: int,
    micro_batch_multiple: int = 1,
    padded: bool = False,
) -> list[MiniBatch]:
    """Cut a step's sequences (in the order of their sample index) into mini-batches.

    Mini-batches are runs of consecutive samples, so that the responses of a prompt stay together
    and the cut does not depend on the layout. Inside a mini-batch the sequences are balanced over
    data-parallel ranks by tokens and packed into micro-batches up to `token_budget`.

    Args:
        lengths: tokens of each sequence, prompt included.
        response_lengths: response tokens of each sequence.
        micro_batch_multiple: the number of micro-batches must be a multiple of it (interleaved
            pipeline schedules ask for a multiple of the pipeline's size).
        padded: a micro-batch has a row for each sequence, padded to its longest: the budget counts
            the padding.
    """
    count = len(lengths)
    plans = []
    for number in range(mini_batches):
        start, end = count * number // mini_batches, count * (number + 1) // mini_batches
        members = range(start, end)
        shares = split_evenly([lengths[i] for i in members], data_parallel_size)
        split = split_padded if padded else split_by_budget
        packed = [split([lengths[start + i] for i in share], token_budget) for share in shares]
        most = max(1, *(len(bins) for bins in packed))
        most = -(-most // micro_batch_multiple) * micro_batch_multiple
        ranks = []
        for share, bins in zip(shares, packed, strict=True):
            bins = level([lengths[start + i] for i in share], bins, most)
            ranks.append(tuple(tuple(start + share[i] for i in bin_) for bin_ in bins))
        plans.append(
            MiniBatch(
                micro_batches=tuple(ranks),
                num_sequences=len(members),
                num_response_tokens=sum(response_lengths[i] for i in members),
            )
        )
    return plans
