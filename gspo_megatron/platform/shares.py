"""Gathers and sums of shares of flat buffers, over ranks on CPUs.

The distributed optimizer sums each rank's share of the gradients and then gathers the shares of the
weights. Gloo sums the whole buffer on every rank, in copies of it, and cuts the share out. Here
each rank sends every other one its share and no more, directly from the buffer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Elements of a message: what is received to be added stays in the caches.
MESSAGE_ELEMENTS = 2**20


def gathering(native: Callable[..., Any]) -> Callable[..., Any]:
    """all_gather_into_tensor, by messages where it runs over CPU tensors."""

    @functools.wraps(native)
    def gather(output: Tensor, input: Tensor, **options: Any) -> Any:
        group = options.get("group")
        if not _is_ours(output, **options):
            return native(output, input, **options)
        shares = output.view(group.size(), -1)
        own = shares[group.rank()]
        if own.data_ptr() != input.data_ptr():
            own.copy_(input.view(-1))
        for to, source in _rounds(group):
            sent = _send(own, to, group)
            for part in shares[source].split(MESSAGE_ELEMENTS):
                dist.recv(part, group=group, group_src=source)
            _finish(sent)
        return None

    return gather


def summing(native: Callable[..., Any]) -> Callable[..., Any]:
    """reduce_scatter_tensor, by messages where it runs over CPU tensors. A share is this rank's own
    one plus those of the ranks before it, the nearest first."""

    @functools.wraps(native)
    def scatter(output: Tensor, input: Tensor, **options: Any) -> Any:
        group = options.get("group")
        is_sum = options.get("op", dist.ReduceOp.SUM) == dist.ReduceOp.SUM
        if not is_sum or not _is_ours(output, **options):
            return native(output, input, **options)
        shares, total = input.view(group.size(), -1), output.view(-1)
        own = shares[group.rank()]
        if own.data_ptr() != total.data_ptr():
            total.copy_(own)
        for to, source in _rounds(group):
            sent = _send(shares[to], to, group)
            received = torch.empty_like(total[:MESSAGE_ELEMENTS])
            for part in total.split(MESSAGE_ELEMENTS):
                found = received[: len(part)]
                dist.recv(found, group=group, group_src=source)
                part.add_(found)
            _finish(sent)
        return None

    return scatter


def _is_ours(output: Tensor, **options: Any) -> bool:
    """On a GPU NCCL does it. Work that goes on in the background is left to gloo, unless there is
    none: a rank alone has at most to copy. (Gloo would copy in a thread with an OpenMP team of its
    own, and with two teams libgomp puts the threads of both to sleep between operations: all that
    follows takes up to twice as long.)"""
    group = options.get("group")
    if group is None or not output.is_cpu:
        return False
    return group.size() == 1 or not options.get("async_op")


def _rounds(group: dist.ProcessGroup) -> Iterator[tuple[int, int]]:
    """The ranks to send to and to receive from, so that every two of the group meet once."""
    rank, size = group.rank(), group.size()
    for distance in range(1, size):
        yield (rank + distance) % size, (rank - distance) % size


def _send(share: Tensor, to: int, group: dist.ProcessGroup) -> list[dist.Work]:
    parts = share.split(MESSAGE_ELEMENTS)
    return [dist.isend(part, group=group, group_dst=to) for part in parts]


def _finish(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()
