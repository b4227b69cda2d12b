"""Megatron-Core's exchanges of gradients and weights between ranks on one machine without GPUs.

Gloo sends them through a socket, even to itself: 23 ms an update of 4 M weights on two ranks, of
which adding them takes one. Here ranks write them into memory that all of them map. A rank alone
copies nothing, and no thread of gloo starts a second team of OpenMP threads, beside which libgomp
puts both teams to sleep between any two operations.
"""

from __future__ import annotations

import functools
import os
import tempfile
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

FOLDER = "/dev/shm"

# Less goes through gloo as fast.
LEAST_BYTES = 2**16


class SharedMemory:
    """One buffer for each rank of a group, mapped by all of them. Grows with what is written."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.size = group, group.rank(), group.size()
        self.buffers: list[Tensor] = []  # [bytes] uint8 of each rank
        self.is_possible = True

    def reserve(self, count: int) -> bool:
        """Whether every rank has `count` bytes in the memory of each; all ranks call it alike."""
        if self.is_possible and (not self.buffers or len(self.buffers[0]) < count):
            self.buffers = []
            self.is_possible = self._map(count)
        return self.is_possible

    def _map(self, count: int) -> bool:
        """Ranks on other machines, and a full or missing file system, are found by trying."""
        name, mapped = "", []
        try:
            with tempfile.NamedTemporaryFile(dir=FOLDER, delete=False) as file:
                name = file.name
                os.posix_fallocate(file.fileno(), 0, count)
        except OSError:
            name = ""
        names: list[str] = [""] * self.size
        dist.all_gather_object(names, name, group=self.group)
        try:
            if all(names):
                mapped = [torch.from_file(n, True, count, dtype=torch.uint8) for n in names]
        except (OSError, RuntimeError):
            mapped = []
        found = [False] * self.size
        dist.all_gather_object(found, bool(mapped), group=self.group)
        if name:
            os.unlink(name)  # it lasts while it is mapped
        if all(found):
            self.buffers = mapped
        return all(found)

    def of(self, rank: int, like: Tensor) -> Tensor:
        """A rank's memory as a tensor like this one."""
        return self.buffers[rank][: like.nbytes].view(like.dtype).view(like.shape)

    def wait(self) -> None:
        dist.barrier(group=self.group)

    def reduce_scatter(self, output: Tensor, input: Tensor) -> None:
        """Sums in the order of the ranks, on every rank."""
        mine, parts = self.of(self.rank, input).view(self.size, -1), input.view(self.size, -1)
        for rank in range(self.size):
            if rank != self.rank:
                mine[rank].copy_(parts[rank])
        self.wait()
        shares = [self.of(rank, input).view(self.size, -1)[self.rank] for rank in range(self.size)]
        shares[self.rank] = parts[self.rank]
        total = torch.add(shares[0], shares[1])
        for share in shares[2:]:
            total += share
        output.view(-1).copy_(total)
        self.wait()

    def all_gather(self, output: Tensor, input: Tensor) -> None:
        self.of(self.rank, input).copy_(input)
        self.wait()
        for rank, part in enumerate(output.view(self.size, -1)):
            if rank != self.rank:
                part.copy_(self.of(rank, input).view(-1))
            elif part.data_ptr() != input.data_ptr():
                part.copy_(input.view(-1))
        self.wait()


_memories: weakref.WeakKeyDictionary[dist.ProcessGroup, SharedMemory] = weakref.WeakKeyDictionary()


def _memory_of(group: dist.ProcessGroup | None, *tensors: Tensor) -> SharedMemory | None:
    """The memory for a collective that ranks call with equal tensors; None: gloo is to do it."""
    count = max(tensor.nbytes for tensor in tensors)
    usable = all(tensor.is_cpu and tensor.is_contiguous() for tensor in tensors)
    if group is None or not usable or count < LEAST_BYTES:
        return None
    memory = _memories.get(group)
    if memory is None:
        memory = _memories[group] = SharedMemory(group)
    return memory if memory.reserve(count) else None


def all_gather_through_memory(native: Any) -> Any:
    """`native`, all_gather_into_tensor, by shared memory where that is possible."""

    @functools.wraps(native)
    def all_gather(output: Tensor, input: Tensor, group: Any = None, async_op: bool = False) -> Any:
        if group is not None and group.size() == 1 and output.is_cpu:
            return _take(output, input)
        memory = None if async_op else _memory_of(group, output, input)
        if memory is None:
            return native(output, input, group=group, async_op=async_op)
        return memory.all_gather(output, input)

    return all_gather


def reduce_scatter_through_memory(native: Any) -> Any:
    """`native`, reduce_scatter_tensor, by shared memory where that is possible."""

    @functools.wraps(native)
    def reduce_scatter(
        output: Tensor,
        input: Tensor,
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        if group is not None and group.size() == 1 and output.is_cpu:
            return _take(output, input)
        is_sum = op == dist.ReduceOp.SUM and not async_op
        memory = _memory_of(group, output, input) if is_sum else None
        if memory is None:
            return native(output, input, op=op, group=group, async_op=async_op)
        return memory.reduce_scatter(output, input)

    return reduce_scatter


def _take(output: Tensor, input: Tensor) -> None:
    """Of a group of one rank, for which the sum, the mean and the parts are all the same."""
    if output.data_ptr() != input.data_ptr():
        output.view(-1).copy_(input.view(-1))
