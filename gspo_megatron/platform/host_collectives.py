"""Collectives of the ranks of one host without GPUs, by memory that they share.

Gloo copies tensors, passes them through sockets, and sums all of a buffer where a rank needs its
share of it. Here ranks write what others need into a window, and read what they need themselves.
Each function takes one of torch.distributed and returns its substitute, which leaves to gloo what
it cannot do: groups over several hosts, work in the background, unusual operations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gspo_megatron.platform.windows import turns, window_of

Collective = Callable[..., Any]

_REDUCTIONS = {
    dist.ReduceOp.SUM: functools.partial(torch.sum, dim=0),
    dist.ReduceOp.MAX: functools.partial(torch.amax, dim=0),
    dist.ReduceOp.MIN: functools.partial(torch.amin, dim=0),
}


class Done:
    """The handle of work in the background that is done: that of a rank alone."""

    def wait(self, _timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def reducing(native: Collective) -> Collective:
    """all_reduce. All ranks have the same bits."""

    @functools.wraps(native)
    def all_reduce(
        tensor: Tensor,
        op: Any = dist.ReduceOp.SUM,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Any:
        reduction = _REDUCTIONS.get(op)
        if reduction is None or not _is_ours(group, async_op, tensor):
            return native(tensor, op, group, async_op)
        group = group or dist.group.WORLD
        if group.size() > 1:
            work, rank = f"all_reduce {reduction.func.__name__}", group.rank()
            flat = tensor.detach().view(-1)
            for piece, memory, meet in turns(group, work, flat.numel(), flat.dtype, rows=1):
                memory[rank, 0].copy_(flat[piece])
                meet()
                flat[piece].copy_(reduction(memory[:, 0]))
        return Done() if async_op else None

    return all_reduce


def gathering(native: Collective) -> Collective:
    """all_gather_into_tensor."""

    @functools.wraps(native)
    def all_gather_into_tensor(
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Any:
        if not _is_ours(group, async_op, output_tensor, input_tensor):
            return native(output_tensor, input_tensor, group, async_op)
        group = group or dist.group.WORLD
        _gather(list(_shares(output_tensor, group)), input_tensor, group)
        return Done() if async_op else None

    return all_gather_into_tensor


def listing(native: Collective) -> Collective:
    """all_gather."""

    @functools.wraps(native)
    def all_gather(
        tensor_list: list[Tensor],
        tensor: Tensor,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Any:
        if not _is_ours(group, async_op, tensor, *tensor_list):
            return native(tensor_list, tensor, group, async_op)
        _gather([each.detach().view(-1) for each in tensor_list], tensor, group or dist.group.WORLD)
        return Done() if async_op else None

    return all_gather


def _gather(outputs: list[Tensor], own: Tensor, group: dist.ProcessGroup) -> None:
    rank, own = group.rank(), own.detach().view(-1)
    if outputs[rank].data_ptr() != own.data_ptr():
        outputs[rank].copy_(own)
    if group.size() == 1:
        return
    for piece, memory, meet in turns(group, "all_gather", own.numel(), own.dtype, rows=1):
        memory[rank, 0].copy_(own[piece])
        meet()
        for source, output in enumerate(outputs):
            if source != rank:
                output[piece].copy_(memory[source, 0])


def summing(native: Collective) -> Collective:
    """reduce_scatter_tensor. A share is this rank's own one plus those of the ranks before it, the
    nearest first."""

    @functools.wraps(native)
    def reduce_scatter_tensor(
        output: Tensor,
        input: Tensor,
        op: Any = dist.ReduceOp.SUM,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Any:
        if op != dist.ReduceOp.SUM or not _is_ours(group, async_op, output, input):
            return native(output, input, op, group, async_op)
        group = group or dist.group.WORLD
        rank, size = group.rank(), group.size()
        shares, total = _shares(input, group), output.detach().view(-1)
        if shares[rank].data_ptr() != total.data_ptr():
            total.copy_(shares[rank])
        if size == 1:
            return Done() if async_op else None
        work, kind = "reduce_scatter", total.dtype
        for piece, memory, meet in turns(group, work, total.numel(), kind, rows=size - 1):
            for row in range(size - 1):  # a row for each distance between two ranks
                memory[rank, row].copy_(shares[(rank + row + 1) % size, piece])
            meet()
            for row in range(size - 1):
                total[piece].add_(memory[rank - row - 1, row])
        return None

    return reduce_scatter_tensor


def exchanging(native: Collective) -> Collective:
    """all_to_all_single."""

    @functools.wraps(native)
    def all_to_all_single(
        output: Tensor,
        input: Tensor,
        output_split_sizes: list[int] | None = None,
        input_split_sizes: list[int] | None = None,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Any:
        if not _is_ours(group, async_op, output, input):
            splits = output_split_sizes, input_split_sizes
            return native(output, input, *splits, group, async_op)
        group = group or dist.group.WORLD
        size = group.size()
        incoming = output.detach().split(output_split_sizes or [len(output) // size] * size)
        outgoing = input.detach().split(input_split_sizes or [len(input) // size] * size)
        _exchange([o.view(-1) for o in incoming], [o.view(-1) for o in outgoing], group)
        return Done() if async_op else None

    return all_to_all_single


def _exchange(incoming: list[Tensor], outgoing: list[Tensor], group: dist.ProcessGroup) -> None:
    """[elements] for each rank and from each rank, contiguous."""
    rank = group.rank()
    incoming[rank].copy_(outgoing[rank])
    if group.size() == 1:
        return
    # The longest of all ranks: so many turns they take together.
    longest = torch.tensor([max(len(each) for each in outgoing)])
    dist.all_reduce(longest, dist.ReduceOp.MAX, group)
    kind = outgoing[0].dtype
    for piece, memory, meet in turns(group, "all_to_all", int(longest), kind, rows=group.size()):
        for target, states in enumerate(outgoing):
            if target != rank:
                part = states[piece]
                memory[rank, target, : len(part)].copy_(part)
        meet()
        for source, states in enumerate(incoming):
            if source != rank:
                part = states[piece]
                part.copy_(memory[source, rank, : len(part)])


def _shares(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[ranks, elements of a share]."""
    return whole.detach().view(group.size(), whole.numel() // group.size())


def _is_ours(group: dist.ProcessGroup | None, async_op: bool, *tensors: Tensor) -> bool:
    """All ranks of the group answer the same: tensors are contiguous, as gloo needs them, or their
    rank ends with an error. A rank alone has at most to copy. (Gloo would copy
    in a thread with an OpenMP team of its own, even in the background, and with two teams libgomp
    puts the threads of both to sleep between operations: all that follows takes up to twice as
    long.)"""
    if not all(tensor.is_cpu for tensor in tensors):
        return False
    group = group or dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):  # torch's sign for a group of other ranks
        return False
    return group.size() == 1 or (not async_op and window_of(group) is not None)
