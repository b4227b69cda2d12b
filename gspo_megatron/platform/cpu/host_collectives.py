"""Collectives between the ranks of one host without GPUs, through shared memory.

Gloo copies tensors, passes them through sockets, and sums a whole buffer even if a rank needs only
its share. Here each rank has a window of shared memory. A rank writes what other ranks need into
its own window, and reads what it needs from their windows. `substitute` leaves all other cases to
gloo: groups over several hosts, work in the background, unusual operations.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gspo_megatron.platform.cpu.windows import turns, window_of

Collective = Callable[..., Any]

_REDUCTIONS = {
    dist.ReduceOp.SUM: functools.partial(torch.sum, dim=0),
    dist.ReduceOp.MAX: functools.partial(torch.amax, dim=0),
    dist.ReduceOp.MIN: functools.partial(torch.amin, dim=0),
}


class Done:
    """The handle of background work in a group of one rank. Such work is done at once."""

    def wait(self, _timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def substitute(native: Collective, own: Collective) -> Collective:
    """Return a collective of torch.distributed that calls `own` if possible, else `native`. `own`
    takes the group first, then the arguments of `native` by name.

    A group of one rank needs at most a copy. (Gloo would copy in a thread with an OpenMP team of
    its own, even in the background. With two teams, libgomp puts the threads of both teams to sleep
    between operations, and all later work takes up to twice as long.)
    """
    signature = inspect.signature(native)
    operations = _REDUCTIONS if own is all_reduce else (dist.ReduceOp.SUM,)

    @functools.wraps(native)
    def collective(*args: Any, **named: Any) -> Any:
        values = signature.bind(*args, **named).arguments
        in_background = values.pop("async_op", False)
        group = values.pop("group", None) or dist.group.WORLD
        # All ranks of the group must take the same decision here. So the decision does not depend
        # on whether a tensor is contiguous. As with gloo, a tensor that is not contiguous is an
        # error.
        is_ours = (
            isinstance(group, dist.ProcessGroup)  # otherwise this rank is not in the group
            and values.get("op", dist.ReduceOp.SUM) in operations
            and all(value.is_cpu for value in values.values() if isinstance(value, Tensor))
            and (group.size() == 1 or (not in_background and window_of(group) is not None))
        )
        if not is_ours:
            return native(*args, **named)
        own(group, **values)
        return Done() if in_background else None

    return collective


def all_reduce(group: dist.ProcessGroup, tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> None:
    """Reduce a tensor. All ranks get the same bits."""
    if group.size() == 1:
        return
    rank, reduction, flat = group.rank(), _REDUCTIONS[op], tensor.detach().view(-1)
    work = f"all_reduce {reduction.func.__name__}"
    for piece, memory, meet in turns(group, work, flat.numel(), flat.dtype, rows=1):
        memory[rank, 0].copy_(flat[piece])
        meet()
        flat[piece].copy_(reduction(memory[:, 0]))


def all_gather_into_tensor(
    group: dist.ProcessGroup, output_tensor: Tensor, input_tensor: Tensor
) -> None:
    """See torch.distributed."""
    all_gather(group, list(_shares(output_tensor, group)), input_tensor)


def all_gather(group: dist.ProcessGroup, tensor_list: list[Tensor], tensor: Tensor) -> None:
    """See torch.distributed."""
    rank, own = group.rank(), tensor.detach().view(-1)
    outputs = [each.detach().view(-1) for each in tensor_list]
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


def reduce_scatter_tensor(
    group: dist.ProcessGroup, output: Tensor, input: Tensor, op: Any = dist.ReduceOp.SUM
) -> None:
    """Sum this rank's share over all ranks: first this rank's own values, then the values of the
    ranks before it, the nearest rank first. Only sums come here: `substitute` leaves other
    operations to gloo."""
    assert op == dist.ReduceOp.SUM, f"reduce_scatter by {op}"
    rank, size = group.rank(), group.size()
    shares, total = _shares(input, group), output.detach().view(-1)
    if shares[rank].data_ptr() != total.data_ptr():
        total.copy_(shares[rank])
    if size == 1:
        return
    work, kind = "reduce_scatter", total.dtype
    for piece, memory, meet in turns(group, work, total.numel(), kind, rows=size - 1):
        for row in range(size - 1):  # a row for each distance between two ranks
            memory[rank, row].copy_(shares[(rank + row + 1) % size, piece])
        meet()
        for row in range(size - 1):
            total[piece].add_(memory[rank - row - 1, row])


def all_to_all_single(
    group: dist.ProcessGroup,
    output: Tensor,
    input: Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
) -> None:
    """See torch.distributed."""
    rank, size = group.rank(), group.size()
    incoming, outgoing = (
        [part.view(-1) for part in states.detach().split(sizes or [len(states) // size] * size)]
        for states, sizes in ((output, output_split_sizes), (input, input_split_sizes))
    )
    incoming[rank].copy_(outgoing[rank])
    if size == 1:
        return
    # The longest part on any rank decides how many turns all ranks take.
    longest = torch.tensor([max(len(each) for each in outgoing)])
    all_reduce(group, longest, dist.ReduceOp.MAX)
    for piece, memory, meet in turns(group, "all_to_all", int(longest), input.dtype, rows=size):
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
    """Return a view [ranks, elements of a share]."""
    return whole.detach().view(group.size(), whole.numel() // group.size())


# The collectives of torch.distributed that are replaced, by name.
COLLECTIVES = {
    own.__name__: own
    for own in (
        all_reduce,
        all_gather,
        all_gather_into_tensor,
        reduce_scatter_tensor,
        all_to_all_single,
    )
}
