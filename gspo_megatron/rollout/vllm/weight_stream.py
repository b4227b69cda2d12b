"""Streams new weights from rank 0 to running servers over the network, without a file.

Rank 0 and the workers of one server form a process group: NCCL on GPUs, gloo on CPUs. Every server
has its own group, so that a dead server does not affect the other servers. Tensors travel as bytes
in buckets. The workers first get the layout of the buckets, see `GspoWorker.receive_weights`.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gspo_megatron.addresses import listen
from gspo_megatron.rollout.vllm.worker.gspo_vllm_group import (
    Group,
    broadcast,
    make_group,
    nccl_version,
)

BUCKET_BYTES = 64 << 20
_ALIGNMENT = 16  # alignment of a tensor in its bucket, in bytes
_LOOK_SECONDS = 1.0  # time between two checks whether a slow server still waits for weights


class WeightStream:
    """Sends the weights of each version to the servers."""

    def __init__(self, host: str, device: torch.device, seconds: float) -> None:
        """host: the address of this machine at which the servers find rank 0; seconds: the time
        limit for one version, after which a server is dropped. Raises OSError if `host` is not an
        address of this machine."""
        self.host, self.device, self.seconds = host, device, seconds
        self.backend = "nccl" if device.type == "cuda" else "gloo"
        listener = listen(host, 0)
        self.port = listener.getsockname()[1]
        self._store = dist.TCPStore(
            host,
            self.port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=seconds),
            # Otherwise the store would listen on all interfaces.
            master_listen_fd=listener.detach(),
        )
        self._groups: dict[str, Group] = {}  # by server key
        # Broadcasts that a hanging server has not received. Freeing such a group blocks until the
        # server is gone or the time limit ends, so the groups stay here.
        self._stuck: list[tuple[dist.Work, Group, Tensor]] = []

    def plan(self, specs: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the arguments that workers need to receive, as JSON values.

        specs: tensors on the meta device, in the order in which they are sent.
        """
        return {
            "host": self.host,
            "port": self.port,
            "backend": self.backend,
            "nccl": nccl_version(self.backend),
            "seconds": self.seconds,
            "buckets": bucket_layout(specs, BUCKET_BYTES),
        }

    def send(
        self,
        plan: Mapping[str, Any],
        receivers: Mapping[str, int],
        tensors: Iterator[tuple[str, Tensor | None]],
        receiving: Callable[[], Collection[str]],
    ) -> None:
        """Send the tensors to the receivers: key of a server -> number of its workers.

        A server that fails is dropped, and the service finds the cause. `tensors` is always
        consumed to its end. receiving(): returns the keys of the servers that still wait for
        weights.
        """
        deadline = time.monotonic() + self.seconds
        groups = self._groups_with(receivers, receiving, deadline)
        for bucket in plan["buckets"]:
            buffer = torch.empty(bucket["bytes"], dtype=torch.uint8, device=self.device)
            for name, _, _, start in bucket["tensors"]:
                found, tensor = next(tensors)
                assert found == name, f"{found} instead of {name}"
                assert tensor is not None, "rank 0 has each tensor"
                content = tensor.contiguous().view(-1).view(torch.uint8)
                buffer[start : start + len(content)] = content
            works = {key: _try_broadcast(group, buffer) for key, group in groups.items()}
            for key, work in works.items():
                if not _completes(work, lambda key=key: key in receiving(), deadline):
                    self._drop(groups.pop(key), work, buffer)
        assert next(tensors, None) is None, "more tensors than planned"
        self._groups = groups

    def _groups_with(
        self,
        receivers: Mapping[str, int],
        receiving: Callable[[], Collection[str]],
        deadline: float,
    ) -> dict[str, Group]:
        """Return the groups of the receivers: groups kept from the last version, and new ones."""
        known = {key: self._groups.pop(key) for key in receivers if key in self._groups}
        self._groups = {}  # drops the groups of servers that are gone
        self._stuck = [entry for entry in self._stuck if not entry[0].is_completed()]
        groups = {}
        for key, workers in receivers.items():
            group = known.get(key) or self._join(key, workers, receiving, deadline)
            if group is not None:
                groups[key] = group
        return groups

    def _drop(self, group: Group, work: dist.Work | None, buffer: Tensor) -> None:
        """Stop sending to a server."""
        abort: Callable[[], None] | None = getattr(group, "abort", None)
        if abort is not None:  # NCCL: ends the kernel that waits for the server
            abort()
        if work is not None and not work.is_completed():
            self._stuck.append((work, group, buffer))

    def _join(
        self,
        key: str,
        workers: int,
        receiving: Callable[[], Collection[str]],
        deadline: float,
    ) -> Group | None:
        """Make the group with a server's workers. Returns None if the workers do not join.

        Making a group blocks, so this function first waits until all workers have announced
        themselves. A worker may still fail before it has joined, so a thread makes the group.
        """
        names = [f"{key}/{rank}" for rank in range(1, workers + 1)]
        while not self._store.check(names):
            if key not in receiving() or time.monotonic() > deadline:
                return None
            time.sleep(0.02)
        seconds, device = timedelta(seconds=max(deadline - time.monotonic(), 1.0)), self.device
        groups: list[Group] = []

        def make() -> None:
            if device.type == "cuda":
                torch.cuda.set_device(device)  # each thread has its own current device
            with contextlib.suppress(RuntimeError):
                # A client of its own, because a client that waits can serve no other thread.
                client = dist.TCPStore(self.host, self.port, is_master=False, timeout=seconds)
                store = dist.PrefixStore(key, client)
                sizes = 0, workers + 1
                groups.append(make_group(self.backend, store, *sizes, seconds, self.host, device))

        thread = threading.Thread(target=make, daemon=True)
        thread.start()
        while thread.is_alive():
            if key not in receiving() or time.monotonic() > deadline:
                return None
            thread.join(0.02)
        return groups[0] if groups else None


def bucket_layout(specs: Mapping[str, Tensor], limit: int) -> list[dict[str, Any]]:
    """Place tensors in buckets of at most `limit` bytes; a larger tensor has a bucket of its own.

    Returns [{bytes, tensors: [[name, dtype, shape, start], ...]}, ...].
    """
    buckets: list[dict[str, Any]] = []
    for name, spec in specs.items():
        size = math.ceil(spec.nbytes / _ALIGNMENT) * _ALIGNMENT
        if not buckets or buckets[-1]["bytes"] + size > limit:
            buckets.append({"bytes": 0, "tensors": []})
        bucket, dtype = buckets[-1], str(spec.dtype).removeprefix("torch.")
        bucket["tensors"].append([name, dtype, list(spec.shape), bucket["bytes"]])
        bucket["bytes"] += size
    return buckets


def _try_broadcast(group: Group, buffer: Tensor) -> dist.Work | None:
    """Begin a broadcast. Returns None if the group is broken."""
    try:
        return broadcast(group, buffer)
    except RuntimeError:
        return None


def _completes(work: dist.Work | None, is_wanted: Callable[[], bool], deadline: float) -> bool:
    """Wait for a broadcast. Returns False if it failed, is late or is no longer wanted.

    The function polls before it calls `wait`. If the peer is dead, `wait` would block until NCCL's
    timeout, which ends the whole process.
    """
    if work is None:
        return False
    look = time.monotonic() + _LOOK_SECONDS
    pause = 1e-5
    while not work.is_completed():
        if time.monotonic() > look:
            if time.monotonic() > deadline or not is_wanted():
                return False
            look = time.monotonic() + _LOOK_SECONDS
        time.sleep(pause)
        pause = min(2 * pause, 1e-3)
    try:
        work.wait()
    except RuntimeError:
        return False
    return True
