"""Plans which data-parallel rank trains on which sequence, and in which micro-batch.

Every rank computes the same plan from the lengths of all sequences of a step.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

# The fixed cost of a micro-batch, as a share of the cost of a full one. It decides how many more
# micro-batches are worth their saved tokens.
COST_OF_MICRO_BATCH = 0.05


@dataclass(frozen=True)
class MiniBatch:
    """The numbers of the sequences of one optimizer update, for each micro-batch of each
    data-parallel rank.

    All ranks have the same number of micro-batches; some may be empty.
    """

    micro_batches: tuple[tuple[tuple[int, ...], ...], ...]  # [data-parallel rank][micro-batch]
    num_sequences: int
    num_response_tokens: int  # counts only tokens to learn from

    @property
    def num_micro_batches(self) -> int:
        """The number of micro-batches of all ranks, without empty ones."""
        return sum(bool(members) for rank in self.micro_batches for members in rank)


def largest_equal_share(count: int, most: int, multiple: int) -> int:
    """Return the largest micro-batch size that splits `count` samples of one length evenly.

    The size is at least 1 and at most `most`. All micro-batches have this size, and their number
    is a multiple of `multiple`.
    """
    rounds = count // multiple
    return max(size for size in range(1, min(max(1, most), rounds) + 1) if rounds % size == 0)


def plan_step(
    lengths: Sequence[int],
    masked_lengths: Sequence[int],
    *,
    mini_batches: int,
    data_parallel_size: int,
    token_budget: int,
    micro_batch_multiple: int = 1,
    padded: bool = False,
    branches: Sequence[Sequence[int]] | None = None,
    prompts: Sequence[tuple[int, int]] | None = None,
) -> list[MiniBatch]:
    """Cut a step's sequences (in the order of their sample index) into mini-batches.

    A mini-batch is a range of consecutive samples. So the responses to a prompt stay together, and
    the cut does not depend on the layout. Within a mini-batch, data-parallel ranks get about the
    same number of tokens, and each rank packs its sequences into micro-batches of up to
    `token_budget` tokens.

    lengths: for each sequence, the number of its tokens, prompt included; masked_lengths: for each
    sequence, the number of response tokens to learn from; micro_batch_multiple: a number that must
    divide the number of micro-batches (see batching.micro_batches); padded: a micro-batch has a row
    for each branch, padded to the longest row, and the budget counts the padding; branches: for
    each sequence, the number of tokens of each branch (branches of a sequence stay together); None:
    each sequence is one branch; prompts: for each sequence, the number of its prompt and the
    prompt's tokens. Give them if a micro-batch holds a prompt once: then responses to a prompt
    stay together. The budget counts the prompt of each response, because attention needs the keys
    of whole sequences.
    """
    count = len(lengths)
    rows = [[length] for length in lengths] if branches is None else branches
    plans = []
    for number in range(mini_batches):
        start, end = count * number // mini_batches, count * (number + 1) // mini_batches
        members = range(start, end)
        own = lengths[start:end]
        if prompts is not None:
            packed = _pack_groups(own, prompts[start:end], data_parallel_size, token_budget)
        else:
            packed = []
            for share in split_evenly(own, data_parallel_size):
                if padded:
                    bins = split_padded([rows[start + i] for i in share], token_budget)
                else:
                    bins = split_by_budget([own[i] for i in share], token_budget)
                packed.append([[share[place] for place in bin_] for bin_ in bins])
        num_bins = max(1, *(len(bins) for bins in packed))
        num_bins = -(-num_bins // micro_batch_multiple) * micro_batch_multiple
        ranks = [
            tuple(tuple(start + i for i in bin_) for bin_ in level(own, bins, num_bins))
            for bins in packed
        ]
        plans.append(
            MiniBatch(
                micro_batches=tuple(ranks),
                num_sequences=len(members),
                num_response_tokens=sum(masked_lengths[i] for i in members),
            )
        )
    return plans


def _pack_groups(
    lengths: Sequence[int], prompts: Sequence[tuple[int, int]], ranks: int, budget: int
) -> list[list[list[int]]]:
    """Return the micro-batches of each rank, in which responses to a prompt are together.

    Long runs of responses to one prompt save most tokens, but they do not fit well into the budget
    and do not balance the ranks well. So several lengths of runs are tried, down to single
    responses. The best plan has the fewest computed tokens on the busiest rank, with a fixed cost
    for each micro-batch.
    """
    totals: dict[int, int] = {}
    for length, (number, _) in zip(lengths, prompts, strict=True):
        totals[number] = totals.get(number, 0) + length
    longest = min(budget, max(totals.values()))
    plans = []
    for limit in (longest, longest // 2, longest // 4, longest // 8, 0):
        runs = _runs(lengths, prompts, limit)
        packed = []
        for share in split_evenly([_computed(run, lengths, prompts) for run in runs], ranks):
            bins = split_by_budget([sum(lengths[i] for i in runs[n]) for n in share], budget)
            packed.append([sorted(i for n in bin_ for i in runs[share[n]]) for bin_ in bins])
        busiest = max(sum(_computed(bin_, lengths, prompts) for bin_ in bins) for bins in packed)
        cost = busiest + COST_OF_MICRO_BATCH * budget * max(map(len, packed))
        plans.append((cost, packed))
    return min(plans, key=lambda plan: plan[0])[1]


def _runs(
    lengths: Sequence[int], prompts: Sequence[tuple[int, int]], limit: int
) -> list[list[int]]:
    """Cut the sequences into runs of responses to one prompt. A run has at most `limit` tokens, or
    one response."""
    runs: list[list[int]] = []
    room, last = 0, None  # of the last run: the tokens that still fit, and the prompt
    for i, (number, _) in enumerate(prompts):
        if number != last or lengths[i] > room:
            runs.append([])
            room, last = limit, number
        runs[-1].append(i)
        room -= lengths[i]
    return runs


def _computed(
    members: Sequence[int], lengths: Sequence[int], prompts: Sequence[tuple[int, int]]
) -> int:
    """Return the tokens that a micro-batch of these sequences computes: each prompt once."""
    distinct = {prompts[i] for i in members}
    return sum(lengths[i] - prompts[i][1] for i in members) + sum(length for _, length in distinct)


def split_by_budget(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Pack sequences into few micro-batches within the token budget (first fit, longest first).

    A sequence longer than the budget gets a micro-batch of its own. The result depends only on the
    arguments.
    """
    bins: list[list[int]] = []
    # `room` is a tree of maxima. It finds the first bin with enough room in logarithmic time. Each
    # leaf is the free room of one bin. Bins that are not opened yet have leaves, too.
    leaves = 1 << max(len(lengths) - 1, 0).bit_length()
    room = [budget] * (2 * leaves)
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = min(lengths[index], budget)
        node = 1
        while node < leaves:
            node *= 2
            node += room[node] < length
        if node - leaves == len(bins):
            bins.append([])
        bins[node - leaves].append(index)
        room[node] -= length
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return [sorted(members) for members in bins]


def split_in_order(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Cut sequences into micro-batches within the token budget. Neighbours stay together.

    A sequence longer than the budget gets a micro-batch of its own.
    """
    return _runs(lengths, [(0, 0)] * len(lengths), budget)


def split_padded(rows: Sequence[Sequence[int]], budget: int) -> list[list[int]]:
    """Split sequences into padded micro-batches. Sequences of similar length go into the same
    micro-batch.

    rows: for each sequence, the lengths of its rows. The number of rows times the longest row
    stays within the token budget; a sequence beyond the budget gets a micro-batch of its own.
    """
    bins: list[list[int]] = []
    room = 0  # rows that still fit into the last bin
    for index in sorted(range(len(rows)), key=lambda i: (-max(rows[i]), i)):
        if room < len(rows[index]):
            bins.append([])
            room = max(len(rows[index]), budget // max(rows[index]))
        bins[-1].append(index)
        room -= len(rows[index])
    return [sorted(members) for members in bins]


def split_evenly(lengths: Sequence[int], parts: int) -> list[list[int]]:
    """Split sequences into exactly `parts` groups of nearly equal token counts.

    Each sequence, longest first, goes to the group with the fewest tokens. Some groups are empty
    if there are fewer sequences than parts.
    """
    groups: list[list[int]] = [[] for _ in range(parts)]
    heap = [(0, 0, group) for group in range(parts)]  # (tokens, sequences, number) of a group
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        tokens, count, lightest = heap[0]
        groups[lightest].append(index)
        heapq.heapreplace(heap, (tokens + lengths[index], count + 1, lightest))
    return [sorted(members) for members in groups]


def level(lengths: Sequence[int], bins: Sequence[list[int]], count: int) -> list[list[int]]:
    """Increase the number of bins to `count` by repeatedly splitting the heaviest bin in two.

    Adds empty bins when every bin holds at most one sequence. No bin gets heavier.
    """
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
