"""The process group in which rank 0 of a run sends weights to a server's workers.

The group uses NCCL on GPUs and gloo on CPUs, and is separate from the groups of Megatron-Core and
vLLM. This file runs in servers, whose environment lacks gspo_megatron; the ranks import it too.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.cuda import nccl

_ON_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


class Group(Protocol):
    """A process group of gloo or NCCL. torch's annotations lack the methods of these groups."""

    def broadcast(self, tensors: list[Tensor], options: dist.BroadcastOptions, /) -> dist.Work: ...


def nccl_version(backend: str) -> list[int | str] | None:
    """Return the version of this process's NCCL; None for gloo. All members need the same version:
    NCCL refuses others, and members of distant versions may wait for each other for ever."""
    return list(nccl.version()) if backend == "nccl" else None


def make_group(
    backend: str,
    store: dist.Store,
    rank: int,
    size: int,
    timeout: timedelta,
    host: str,
    device: torch.device | None = None,
) -> Group:
    """Join the group. Its rank 0 is rank 0 of the run.

    host: the address of this machine at which the other members find it; without it, gloo would use
    the address of the host's name. device: where buffers are; None: the CPU. Raises RuntimeError.

    This call blocks until all members have joined, and NCCL has no time limit for it: NCCL connects
    the members in the first broadcast.
    """
    group = _make_group(backend, store, rank, size, timeout, host)
    broadcast(group, torch.zeros(1, dtype=torch.uint8, device=device or "cpu")).wait()
    return group


def _make_group(
    backend: str, store: dist.Store, rank: int, size: int, timeout: timedelta, host: str
) -> Group:
    groups: Any = dist  # torch's annotations lack the options of the groups too
    if backend == "nccl":
        options = groups.ProcessGroupNCCL.Options()
        options._timeout = timeout
        # By default NCCL's watchdog ends the process if a member fails. The callers of `broadcast`
        # see failures, so 2 (clean up only) is enough. The group reads it when it is made.
        before = os.environ.get(_ON_ERRORS)
        os.environ[_ON_ERRORS] = "2"
        try:
            return groups.ProcessGroupNCCL(store, rank, size, options)
        finally:
            os.environ.pop(_ON_ERRORS)
            if before is not None:
                os.environ[_ON_ERRORS] = before
    options = groups.ProcessGroupGloo._Options()
    options._timeout = timeout
    options._devices = [groups.ProcessGroupGloo.create_device(hostname=host)]
    return groups.ProcessGroupGloo(store, rank, size, options)


def broadcast(group: Group, buffer: Tensor) -> dist.Work:
    """Send the buffer of rank 0 to all members. Raises RuntimeError if the group is broken."""
    options = dist.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    return group.broadcast([buffer], options)
