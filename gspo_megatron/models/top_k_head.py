"""Log-probabilities of several candidates for each row, and of all other tokens together, with a
sharded vocabulary. The module also finds the most probable tokens of each row.

The k candidates and the rest of the vocabulary are k + 1 buckets, whose probabilities add up to 1.
Logits exist one tile at a time and are computed again in the backward pass, as in logprob_head.py.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from torch import Tensor
from torch.autograd.function import once_differentiable

from gspo_megatron.models.logprob_head import (
    LN_2,
    GradientSums,
    locate,
    row_maximum,
    rows_in_vocabulary,
    tile_buffer,
    tile_logits,
    tiles_of,
    to_base_2,
)

NO_TOKEN = -1  # fills up the candidates of a row that has fewer than k
# A lower bound of the probability of all other tokens. The bound is about the precision of a sum of
# probabilities in float32. With this bound, the logarithm is finite even if the candidates are the
# whole vocabulary.
SMALLEST_REST = 2.0**-24


def bucket_logprobs(
    hidden: Tensor,
    weight: Tensor,
    candidates: Tensor,
    *,
    temperature: float = 1.0,
    chunk_size: int | None = None,
    process_group: dist.ProcessGroup | None = None,
    vocab_start: int = 0,
    vocab_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute log-probabilities [rows, k + 1]. The first k columns are for the candidates; the last
    column is for all other tokens together. Also return [rows] bool, without gradient: whether the
    first candidate is the row's most probable token.

    candidates: [rows, k] int64, no two in a row equal. Candidates that are not in the vocabulary,
    such as NO_TOKEN, have the log-probability -inf and no gradient. The other arguments, the dtypes
    and the gradient of `hidden` are those of `logprob_and_entropy`. The forward pass has two
    collectives, of [rows] and of [rows, 2 k + 1]; the backward pass has none.
    """
    assert candidates.dim() == 2 and len(candidates) == len(hidden), (
        f"candidates {tuple(candidates.shape)} for hidden {tuple(hidden.shape)}"
    )
    used = rows_in_vocabulary(weight, vocab_start, vocab_size)
    local = candidates - vocab_start
    return _Buckets.apply(hidden, weight, local, used, temperature, chunk_size, process_group)


class _Buckets(torch.autograd.Function):
    """The autograd function behind `bucket_logprobs`. `local` [rows, k] are row numbers of
    `weight`; its first `used` rows are in the vocabulary."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        local: Tensor,
        used: int,
        temperature: float,
        chunk_size: int | None,
        process_group: dist.ProcessGroup | None,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        row_blocks, column_blocks = tiles_of(
            len(hidden), used, chunk_size, dtype.itemsize, hidden.device
        )
        owned = (local >= 0) & (local < used)  # [rows, k]
        # for each block of columns: maximum, and sum of exponentials without the candidates
        maxima, sums = hidden.new_empty((2, len(column_blocks), len(hidden)), dtype=dtype)
        candidate_logits = hidden.new_zeros(local.shape, dtype=dtype)  # logits of the candidates
        buffer = tile_buffer(hidden, row_blocks, column_blocks, dtype)
        inputs, factor = to_base_2(hidden, temperature, dtype)
        for place, columns in enumerate(column_blocks):
            for rows in row_blocks:
                logits = tile_logits(inputs[rows], weight[columns], factor, buffer)
                index, inside = locate(local[rows], columns)
                candidate_logits[rows] += logits.gather(1, index).where(inside, 0.0)
                maxima[place, rows] = logits.amax(-1)
                exponentials = logits.sub_(maxima[place, rows, None]).exp2_()
                _zero_candidates(exponentials, index, inside)
                sums[place, rows] = exponentials.sum(-1)
        maximum = row_maximum(maxima, process_group)  # [rows]
        rest = (sums * (maxima - maximum).exp2()).sum(0)
        # [rows, 2 k + 1]; the last k count the ranks that own a candidate. A candidate without an
        # owner has the probability 0.
        parts = torch.cat([rest[:, None], candidate_logits, owned.to(dtype)], 1)
        if process_group is not None:
            dist.all_reduce(parts, group=process_group)
        rest, candidate_logits, owners = parts.split([1, *2 * [local.shape[1]]], 1)
        shifted = (candidate_logits - maximum[:, None]).where(owners > 0, -torch.inf)  # [rows, k]
        log_sum = (rest[:, 0] + shifted.exp2().sum(1)).log2()
        smallest = rest.new_full((), SMALLEST_REST).log2()
        log_rest = (rest.log2() - log_sum[:, None]).clamp_min(smallest)
        logprobs = torch.cat([shifted - log_sum[:, None], log_rest], 1) * LN_2
        is_greedy = shifted[:, 0] >= 0
        ctx.save_for_backward(hidden, weight, local, maximum + log_sum, logprobs)
        ctx.temperature, ctx.tiles = temperature, (row_blocks, column_blocks)
        ctx.mark_non_differentiable(is_greedy)
        return logprobs, is_greedy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, local, logsumexp, logprobs = ctx.saved_tensors
        probabilities = logprobs.exp()  # [rows, k + 1]
        # Constants have no gradient: a candidate that no rank owns, and a rest at its lower bound.
        has_rest = probabilities[:, -1] > 1.5 * SMALLEST_REST
        gradient = (gradient / ctx.temperature).where(probabilities > 0, 0.0)
        gradient[:, -1] *= has_rest
        total = gradient.sum(1, keepdim=True)
        of_candidates = gradient[:, :-1] - probabilities[:, :-1] * total  # [rows, k]
        # the derivative of log(rest) by the logit of a token in the rest is the token's share of
        # the rest
        of_rest = gradient[:, -1:] / probabilities[:, -1:] - total  # [rows, 1], a factor of p
        row_blocks, column_blocks = ctx.tiles
        sums = GradientSums(hidden, weight, row_blocks, ctx.needs_input_grad, None)
        buffer = tile_buffer(hidden, row_blocks, column_blocks, logprobs.dtype)
        inputs, factor = to_base_2(hidden, ctx.temperature, logprobs.dtype)
        for columns in column_blocks:
            for rows in row_blocks:
                index, inside = locate(local[rows], columns)
                logits = tile_logits(inputs[rows], weight[columns], factor, buffer)
                p = logits.sub_(logsumexp[rows, None]).exp2_()
                _zero_candidates(p, index, inside)
                p *= of_rest[rows]
                p.scatter_add_(1, index, of_candidates[rows].where(inside, 0.0))
                sums.add(rows, columns, p.to(hidden.dtype))
        return *sums.result(), None, None, None, None, None


def _zero_candidates(values: Tensor, index: Tensor, inside: Tensor) -> None:
    """Set the values of the candidates inside this tile to exactly 0, by subtracting each from
    itself. Candidates outside this tile have an index, too, but nothing is subtracted at this
    index."""
    values.scatter_add_(1, index, -values.gather(1, index).where(inside, 0.0))


@torch.no_grad()
def most_probable(
    hidden: Tensor,
    weight: Tensor,
    k: int,
    *,
    process_group: dist.ProcessGroup | None = None,
    vocab_start: int = 0,
    vocab_size: int | None = None,
) -> Tensor:
    """Return the k most probable tokens of each row, the most probable first: [rows, k] int64.

    Rows are filled up with NO_TOKEN if the vocabulary has fewer tokens. Each rank of the group
    sends k tokens of its own shard for each row.
    """
    used = rows_in_vocabulary(weight, vocab_start, vocab_size)
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    row_blocks, column_blocks = tiles_of(len(hidden), used, None, dtype.itemsize, hidden.device)
    buffer = tile_buffer(hidden, row_blocks, column_blocks, dtype)
    logits = hidden.new_full((len(hidden), k), -torch.inf, dtype=dtype)
    tokens = torch.full((len(hidden), k), NO_TOKEN, device=hidden.device)
    for columns in column_blocks:
        for rows in row_blocks:
            tile = tile_logits(hidden[rows], weight[columns], 1.0, buffer)
            values, places = tile.topk(min(k, tile.shape[1]))
            more = torch.cat([logits[rows], values], 1)
            ids = torch.cat([tokens[rows], places + (columns.start + vocab_start)], 1)
            logits[rows], chosen = more.topk(k)
            tokens[rows] = ids.gather(1, chosen)
    if process_group is not None:
        logits, tokens = (
            gather_from_tensor_model_parallel_region(each, group=process_group)
            for each in (logits, tokens)
        )
        tokens = tokens.gather(1, logits.topk(k)[1])
    return tokens


def with_rest(logprobs: Tensor) -> Tensor:
    """Append the log-prob of all other tokens to log-probs [rows, k], as `bucket_logprobs` computes
    it: [rows, k + 1]."""
    rest = 1.0 - logprobs.double().exp().sum(1, keepdim=True)
    return torch.cat([logprobs, rest.clamp_min(SMALLEST_REST).log().to(logprobs.dtype)], 1)
