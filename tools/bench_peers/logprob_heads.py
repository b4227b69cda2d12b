"""Log-probability and entropy of full-size logits, as others compute them, and the exact results.

Every function takes (hidden [rows, hidden], weight [vocab/TP, hidden], targets [rows], process
group or None, id of the weight's first row) and returns log-probabilities and entropies [rows];
gradients flow through the log-probabilities only, as in a policy loss without entropy bonus.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

Head = tuple[Tensor, Tensor]


def straightforward(
    hidden: Tensor, weight: Tensor, targets: Tensor, group: dist.ProcessGroup | None, start: int
) -> Head:
    """The steps of Megatron-Core's vocab-parallel cross entropy, in place on the logits. The
    entropy uses the same exponentials: as few passes over the logits as plain torch allows."""
    return _InPlace.apply((hidden @ weight.t()).float(), targets - start, group)


def shared_softmax(
    hidden: Tensor, weight: Tensor, targets: Tensor, group: dist.ProcessGroup | None, start: int
) -> Head:
    """The way of slime's trainer (slime/utils/ppo_utils.py, written anew here): the logits are
    kept, and one softmax in addition to them gives the log-prob and the entropy."""
    return _Beside.apply((hidden @ weight.t()).float(), targets - start, group)


class _InPlace(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, group: dist.ProcessGroup | None
    ) -> tuple[Tensor, Tensor]:
        maximum = logits.amax(-1)
        _reduce(maximum, group, dist.ReduceOp.MAX)
        logits -= maximum[:, None]
        index, owned = _locate(targets, logits)
        target_logit = logits.gather(1, index[:, None])[:, 0] * owned
        softmax = logits.exp()
        sums = torch.stack([softmax.sum(-1), logits.mul_(softmax).sum(-1), target_logit])
        _reduce(sums, group)
        sum_exp, weighted_logit, target_logit = sums
        softmax /= sum_exp[:, None]
        ctx.save_for_backward(softmax, index, owned)
        entropy = sum_exp.log() - weighted_logit / sum_exp
        ctx.mark_non_differentiable(entropy)
        return target_logit - sum_exp.log(), entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, logprob_grad: Tensor, _: Any) -> tuple[Tensor, None, None]:
        return _gradient(*ctx.saved_tensors, logprob_grad), None, None


class _Beside(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, group: dist.ProcessGroup | None
    ) -> tuple[Tensor, Tensor]:
        maximum = logits.amax(-1)
        _reduce(maximum, group, dist.ReduceOp.MAX)
        softmax = logits - maximum[:, None]
        index, owned = _locate(targets, logits)
        target_logit = softmax.gather(1, index[:, None])[:, 0] * owned
        sum_exp = softmax.exp_().sum(-1)
        _reduce(sum_exp, group)
        softmax /= sum_exp[:, None]
        if logits.is_cuda:  # needs no temporary tensor of the size of the logits
            mean_logit = torch.einsum("ij,ij->i", softmax, logits)
        else:
            mean_logit = (softmax * logits).sum(-1)
        _reduce(mean_logit, group)
        _reduce(target_logit, group)
        ctx.save_for_backward(softmax, index, owned)
        entropy = maximum + sum_exp.log() - mean_logit
        ctx.mark_non_differentiable(entropy)
        return target_logit - sum_exp.log(), entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, logprob_grad: Tensor, _: Any) -> tuple[Tensor, None, None]:
        return _gradient(*ctx.saved_tensors, logprob_grad), None, None


def _gradient(softmax: Tensor, index: Tensor, owned: Tensor, logprob_grad: Tensor) -> Tensor:
    """The gradient of the logits, in the memory of the softmax."""
    softmax.scatter_add_(1, index[:, None], -owned[:, None])
    return softmax.mul_(-logprob_grad[:, None])


def _locate(targets: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Column of each target and 1 if this rank has it, otherwise any column and 0."""
    index = targets.clamp(0, logits.shape[1] - 1)
    return index, (index == targets).to(logits.dtype)


def _reduce(
    values: Tensor, group: dist.ProcessGroup | None, operation: Any = dist.ReduceOp.SUM
) -> None:
    if group is not None:
        dist.all_reduce(values, operation, group=group)


def exact(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    group: dist.ProcessGroup | None,
    start: int,
    logprob_grad: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The definitions in float64: log-probabilities, entropies, and the gradients of hidden states
    (this rank's share) and weight for the gradient `logprob_grad` of the log-probabilities."""
    hidden, weight, gradient = hidden.double(), weight.double(), logprob_grad.double()
    logits = hidden @ weight.t()
    maximum = logits.amax(-1)
    _reduce(maximum, group, dist.ReduceOp.MAX)
    sum_exp = (logits - maximum[:, None]).exp().sum(-1)
    _reduce(sum_exp, group)
    log_p = logits - (maximum + sum_exp.log())[:, None]
    index, owned = _locate(targets - start, logits)
    logprob = log_p.gather(1, index[:, None])[:, 0] * owned
    _reduce(logprob, group)
    p = log_p.exp()
    entropy = -(p * log_p).sum(-1)
    _reduce(entropy, group)
    from_logits = _gradient(p, index, owned, gradient)
    return logprob, entropy, from_logits @ weight, from_logits.t() @ hidden
