"""Gathers and sums of shares of flat buffers, over ranks on CPUs.

The distributed optimizer sums each rank's share of the gradients and then gathers the shares of the
weights. Gloo sums the whole buffer on every rank, in copies of it, and cuts the share out; all of
it passes through sockets. Here the ranks of a host write what others need into memory that they
share, and read what they need themselves. Groups over several hosts are left to gloo.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import math
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

MEMORY = "/dev/shm"  # a file system in memory
WINDOW_BYTES = 32 * 2**20  # of a group
ALIGNMENT = 64  # bytes


def gathering(native: Callable[..., Any]) -> Callable[..., Any]:
    """all_gather_into_tensor, by shared memory where ranks on CPUs have it."""

    @functools.wraps(native)
    def gather(output: Tensor, input: Tensor, **options: Any) -> Any:
        if not _is_ours(output, **options):
            return native(output, input, **options)
        group = options["group"]
        rank, shares = group.rank(), output.view(group.size(), -1)
        own = shares[rank]
        if own.data_ptr() != input.data_ptr():
            own.copy_(input.view(-1))
        for piece, memory in _turns(group, own, rows=1):
            memory[rank, 0].copy_(own[piece])
            dist.barrier(group)
            for source in range(group.size()):
                if source != rank:
                    shares[source, piece].copy_(memory[source, 0])
        return None

    return gather


def summing(native: Callable[..., Any]) -> Callable[..., Any]:
    """reduce_scatter_tensor, by shared memory where ranks on CPUs have it. A share is this rank's
    own one plus those of the ranks before it, the nearest first."""

    @functools.wraps(native)
    def scatter(output: Tensor, input: Tensor, **options: Any) -> Any:
        is_sum = options.get("op", dist.ReduceOp.SUM) == dist.ReduceOp.SUM
        if not is_sum or not _is_ours(output, **options):
            return native(output, input, **options)
        group = options["group"]
        rank, size = group.rank(), group.size()
        shares, total = input.view(size, -1), output.view(-1)
        if shares[rank].data_ptr() != total.data_ptr():
            total.copy_(shares[rank])
        for piece, memory in _turns(group, total, rows=size - 1):
            for row in range(size - 1):  # a row for each distance between two ranks
                memory[rank, row].copy_(shares[(rank + row + 1) % size, piece])
            dist.barrier(group)
            for row in range(size - 1):
                total[piece].add_(memory[rank - row - 1, row])
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
    return group.size() == 1 or (not options.get("async_op") and _window(group) is not None)


def _turns(group: dist.ProcessGroup, share: Tensor, rows: int) -> Iterator[tuple[slice, Tensor]]:
    """Cuts a share into pieces that fit into the window: each piece, and the memory for it [ranks,
    rows, elements of the piece].

    In each turn every rank writes to its place, all meet, and each reads what the others wrote. The
    window has two halves. One is written again in the next turn but one: by then all have met once
    more, so all have read it.
    """
    if group.size() == 1:
        return
    halves = _window(group)
    assert halves is not None
    first = 0
    while first < share.numel():
        memory = next(halves).view(share.dtype).unflatten(1, (rows, -1))
        piece = slice(first, min(first + memory.shape[2], share.numel()))
        yield piece, memory[:, :, : piece.stop - first]
        first = piece.stop


# By group: the halves of its window [ranks, bytes] in turns, or None where it has none.
_windows: WeakKeyDictionary[dist.ProcessGroup, Iterator[Tensor] | None] = WeakKeyDictionary()


def _window(group: dist.ProcessGroup) -> Iterator[Tensor] | None:
    if group not in _windows:
        memory = _share_memory(group)
        _windows[group] = None if memory is None else itertools.cycle(memory.unbind(0))
    return _windows[group]


def _share_memory(group: dist.ProcessGroup) -> Tensor | None:
    """[2, ranks, bytes] uint8, the same memory for all ranks of the group; None for all of them if
    they are on several hosts, or if there is not enough of it. Every rank of the group calls it."""
    dist.barrier(group)  # the first one waits here, where no file of its own could stay behind
    size = group.size()
    unit = (size - 1) * ALIGNMENT  # so that a row for each other rank fits, of any dtype
    shape = (2, size, WINDOW_BYTES // (2 * size * unit) * unit)
    path, memory = "", None
    try:
        if group.rank() == 0:
            with contextlib.suppress(OSError):
                path = _new_file(math.prod(shape))
        told = [path]
        dist.broadcast_object_list(told, group=group, group_src=0)
        if told[0] and os.path.exists(told[0]):  # on another host it is not there
            with contextlib.suppress(RuntimeError):
                memory = torch.from_file(told[0], True, math.prod(shape), dtype=torch.uint8)
        # Megatron-Core lets torch collect all_reduce, all_gather_into_tensor and
        # reduce_scatter_tensor here, to run them later.
        has_memory = torch.full((size,), memory is not None)
        for source in range(size):
            dist.broadcast(has_memory[source : source + 1], group=group, group_src=source)
    finally:
        if path:
            os.unlink(path)  # the memory is freed when the last rank has ended, however it ends
    return memory.view(shape) if memory is not None and bool(has_memory.all()) else None


def _new_file(size: int) -> str:
    """A file in memory, of which every page exists. (Writing to one that the file system has no
    room for would kill the process.) Raises OSError if it would leave little room for others."""
    room = os.statvfs(MEMORY)
    if room.f_bavail * room.f_frsize < 4 * size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), MEMORY)
    descriptor, path = tempfile.mkstemp(prefix="gspo-megatron-", dir=MEMORY)
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError:
        os.unlink(path)
        raise
    finally:
        os.close(descriptor)
    return path
