"""The process group in which rank 0 of a run sends weights to a server's workers.

The group uses NCCL on GPUs and gloo on CPUs, and is separate from the groups of Megatron-Core and
vLLM. This file runs in servers, whose environment lacks gspo_megatron; the ranks import it too.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor


class Group(Protocol):
    """A process group of gloo or NCCL. torch's annotations lack the methods of these groups."""

    def broadcast(self, tensors: list[Tensor], options: dist.BroadcastOptions, /) -> dist.Work: ...


def make_group(
    backend: str, store: dist.Store, rank: int, size: int, timeout: timedelta, host: str
) -> Group:
    """Join the group. Its rank 0 is rank 0 of the run.

    host: the address of this machine at which the other members find it; without it, gloo would use
    the address of the host's name. Raises RuntimeError.
    """
    groups: Any = dist  # torch's annotations lack the options of the groups too
    if backend == "nccl":
        options = groups.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return groups.ProcessGroupNCCL(store, rank, size, options)
    options = groups.ProcessGroupGloo._Options()
    options._timeout = timeout
    options._devices = [groups.ProcessGroupGloo.create_device(hostname=host)]
    return groups.ProcessGroupGloo(store, rank, size, options)


def broadcast(group: Group, buffer: Tensor) -> dist.Work:
    """Send the buffer of rank 0 to all members. Raises RuntimeError if the group is broken."""
    options = dist.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    return group.broadcast([buffer], options)
