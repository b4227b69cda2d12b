"""Log-probability of given tokens and entropy from hidden states, with a vocabulary in shards.

The output layer, the softmax and both figures in one differentiable operation that works through
the rows in chunks, so that the logits [rows, vocab/TP] never exist whole. One softmax serves both
figures. The backward pass computes the logits of a chunk again from the saved log-sum-exp.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

# The exponentials of a batch that is a single chunk are kept for the backward pass up to this size:
# small models need not compute the logits twice, and large ones never notice the memory.
KEEP_EXPONENTIALS_BYTES = 16 * 2**20


def logprob_and_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    chunk_size: int = 1024,
    process_group: dist.ProcessGroup | None = None,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of `targets` and full-vocabulary entropies, both [rows], in nats.

    Args:
        hidden: [rows, hidden], the same on every rank of `process_group`.
        weight: [vocab/TP, hidden], this rank's rows of the output layer, of the dtype of `hidden`.
        targets: [rows] int64, ids of the whole vocabulary. The log-probability of a target that is
            not in the vocabulary is NaN.
        temperature: the logits are divided by it before the softmax.
        chunk_size: rows worked on at a time; bounds the memory at chunk_size * vocab/TP elements.
        process_group: the tensor-parallel group; None where `weight` is the whole vocabulary.
        vocab_start: id of the first row of `weight`.
        vocab_size: true size of the whole vocabulary; rows of `weight` that pad it beyond are left
            out of the softmax and get no gradient. None: there is no padding.
        entropy_gradient: let gradients flow through the entropy; without it, it is a mere figure.

    Returns:
        Log-probabilities and entropies in float32 (float64 for float64 inputs). Logits are computed
        in the dtype of `hidden`, everything after them in that of the result.

    The gradient of `hidden` is this rank's share, from its part of the vocabulary: the caller sums
    it over the group. Two collectives a chunk in the forward pass, none in the backward pass.
    """
    return VocabParallelLogProb.apply(
        hidden,
        weight,
        targets,
        temperature,
        chunk_size,
        process_group,
        vocab_start,
        vocab_size,
        entropy_gradient,
    )


class VocabParallelLogProb(torch.autograd.Function):
    """The autograd function behind `logprob_and_entropy`, with the same arguments by position."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        process_group: dist.ProcessGroup | None,
        vocab_start: int,
        vocab_size: int | None,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        _check(hidden, weight, targets, temperature, chunk_size)
        rows = hidden.shape[0]
        weight_used = weight[: _used_rows(weight, vocab_start, vocab_size)]
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        index, owned = _locate(targets - vocab_start, weight_used.shape[0], dtype)
        figures = hidden.new_empty((5, rows), dtype=dtype)
        exponentials = None
        for chunk in _chunks(rows, chunk_size):
            logits = _logits(hidden[chunk], weight_used, temperature)
            figures[0, chunk] = maximum = _row_maximum(logits, process_group)
            exponentials, sums = _softmax_sums(logits, maximum, index[chunk], owned[chunk])
            if process_group is not None:
                dist.all_reduce(sums, group=process_group)
            figures[1:, chunk] = sums
        maximum, sum_exp, weighted_logit, target_logit, owners = figures
        log_sum = sum_exp.log()
        # 0/0 = NaN where no rank owns the target: it must not pass for a likely token.
        logprob = target_logit / owners - log_sum
        entropy = log_sum - weighted_logit / sum_exp
        if rows > chunk_size or entropy_gradient or not _worth_keeping(exponentials):
            exponentials = None
        ctx.save_for_backward(
            hidden, weight_used, index, owned, maximum + log_sum, sum_exp, entropy, exponentials
        )
        ctx.temperature, ctx.chunk_size, ctx.vocab_rows = temperature, chunk_size, weight.shape[0]
        ctx.set_materialize_grads(False)
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return logprob, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, logprob_grad: Tensor | None, entropy_grad: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        hidden, weight, index, owned, logsumexp, sum_exp, entropy, exponentials = saved
        # The logits were divided by the temperature, and so is every gradient that reaches them.
        if logprob_grad is None:
            logprob_grad = torch.zeros_like(entropy)
        logprob_grad = logprob_grad / ctx.temperature
        if entropy_grad is not None:
            entropy_grad = entropy_grad / ctx.temperature
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        hidden_grad = torch.empty_like(hidden) if needs_hidden else None
        weight_grad = None
        if needs_weight:
            # Many chunks add up: in low precision the later ones would be lost.
            dtype = entropy.dtype if len(hidden) > ctx.chunk_size else weight.dtype
            weight_grad = weight.new_zeros((ctx.vocab_rows, weight.shape[1]), dtype=dtype)
        for chunk in _chunks(len(hidden), ctx.chunk_size):
            if exponentials is not None:
                gradient = exponentials * (-logprob_grad / sum_exp)[:, None]
            else:
                log_p = _logits(hidden[chunk], weight, ctx.temperature)
                log_p -= logsumexp[chunk, None]
                gradient = _softmax_gradient(log_p, entropy, logprob_grad, entropy_grad, chunk)
            if gradient.shape[1] > 0:
                at_target = logprob_grad[chunk] * owned[chunk]
                gradient.scatter_add_(1, index[chunk, None], at_target[:, None])
            gradient = gradient.to(hidden.dtype)
            if hidden_grad is not None:
                torch.mm(gradient, weight, out=hidden_grad[chunk])
            if weight_grad is not None:
                _accumulate(weight_grad[: len(weight)], gradient.t(), hidden[chunk])
        if weight_grad is not None:
            weight_grad = weight_grad.to(weight.dtype)
        return hidden_grad, weight_grad, None, None, None, None, None, None, None


def _check(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, chunk_size: int
) -> None:
    assert hidden.dim() == 2 and weight.dim() == 2 and hidden.shape[1] == weight.shape[1], (
        f"hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)} do not multiply"
    )
    assert hidden.dtype == weight.dtype, f"hidden is {hidden.dtype}, weight is {weight.dtype}"
    assert targets.shape == hidden.shape[:1], (
        f"targets {tuple(targets.shape)} for hidden {tuple(hidden.shape)}"
    )
    assert temperature > 0, f"temperature {temperature}"
    assert chunk_size > 0, f"chunk_size {chunk_size}"


def _chunks(rows: int, chunk_size: int) -> list[slice]:
    return [slice(start, min(start + chunk_size, rows)) for start in range(0, rows, chunk_size)]


def _used_rows(weight: Tensor, vocab_start: int, vocab_size: int | None) -> int:
    """How many rows of `weight` belong to the vocabulary; the last rank may hold only padding."""
    if vocab_size is None:
        return weight.shape[0]
    return min(max(vocab_size - vocab_start, 0), weight.shape[0])


def _locate(local_targets: Tensor, used: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Column of each target [rows], some legal one for those of other ranks, and 1 where it is
    this rank's, else 0."""
    index = local_targets.clamp(0, max(used - 1, 0))
    return index, ((index == local_targets) & (used > 0)).to(dtype)


def _worth_keeping(exponentials: Tensor | None) -> bool:
    if exponentials is None:
        return False
    return exponentials.numel() * exponentials.element_size() <= KEEP_EXPONENTIALS_BYTES


def _logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """[rows, vocab/TP], a fresh tensor of at least float32."""
    logits = hidden @ weight.t()
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits if temperature == 1.0 else logits.div_(temperature)


def _row_maximum(logits: Tensor, process_group: dist.ProcessGroup | None) -> Tensor:
    """[rows], over all ranks."""
    if logits.shape[1] > 0:
        maximum = logits.amax(dim=-1)
    else:
        maximum = logits.new_full((logits.shape[0],), -math.inf)
    if process_group is not None:
        dist.all_reduce(maximum, dist.ReduceOp.MAX, group=process_group)
    return maximum


def _softmax_sums(
    logits: Tensor, maximum: Tensor, index: Tensor, owned: Tensor
) -> tuple[Tensor, Tensor]:
    """exp(logits - maximum) [rows, vocab/TP], and this rank's part of the sums over the vocabulary.

    The sums [4, rows]: of the exponentials, of the shifted logits times them, the target's shifted
    logit, and the number of its owners. `logits` is overwritten.
    """
    logits -= maximum[:, None]
    if logits.shape[1] > 0:
        target_logit = logits.gather(1, index[:, None])[:, 0] * owned
    else:
        target_logit = torch.zeros_like(owned)
    exponentials = logits.exp()
    sum_exp = exponentials.sum(-1)
    weighted_logit = logits.mul_(exponentials).sum(-1)
    return exponentials, torch.stack([sum_exp, weighted_logit, target_logit, owned])


def _softmax_gradient(
    log_p: Tensor,
    entropy: Tensor,
    logprob_grad: Tensor,
    entropy_grad: Tensor | None,
    chunk: slice,
) -> Tensor:
    """Gradient of the logits [rows, vocab/TP] but for the targets' own; overwrites `log_p`.

    d logprob / d logit_j = [j is the target] - p_j and d entropy / d logit_j = -p_j (log p_j + H).
    """
    if entropy_grad is None:
        return log_p.exp_().mul_(-logprob_grad[chunk, None])
    p = log_p.exp()
    log_p += entropy[chunk, None]
    log_p *= entropy_grad[chunk, None]
    log_p += logprob_grad[chunk, None]
    return p.mul_(log_p).neg_()


def _accumulate(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, where the product may be of a lower precision than the total."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right
