"""Memory that the ranks of one host share, a window for each process group, where they also meet.

Gloo's ranks sleep until a message wakes them, which takes 1 ms on average on a virtual machine. In
a window each rank counts its arrivals, and the others look.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import mmap
import os
import platform
import tempfile
import time
from collections.abc import Iterator
from weakref import WeakKeyDictionary, finalize

import torch
import torch.distributed as dist

from gspo_megatron.cores import usable_cores

MEMORY = "/dev/shm"  # a file system in memory
PIECE_BYTES = 2**20  # what each rank writes in a turn, for each rank that reads
MOST_BYTES = 32 * 2**20  # of a window
LINE = 64  # bytes of a cache line: each rank's counter has its own

# A rank that waits asks again and again, and gives its core away each time. A longer wait sleeps.
SPIN_SECONDS = 0.005
NAP_SECONDS = (5e-5, 1e-3)  # the first one, and the longest

# Python has no memory barriers. These processors show writes to others in the order of the program.
ORDERED_PROCESSORS = ("x86_64", "AMD64")


class Window:
    """The memory of a group. `halves` are its two halves in turns, [ranks, bytes] uint8 each."""

    def __init__(self, group: dist.ProcessGroup, file: int) -> None:
        """file: a descriptor, which the window closes. Raises OSError where it cannot be mapped."""
        self.file, self.rank, size = file, group.rank(), group.size()
        finalize(self, os.close, file)
        # A lock lasts as long as the process, however it ends; the others can see that.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, self.rank)
        memory = mmap.mmap(file, 0)
        self.arrivals = memoryview(memory).cast("q")[: size * LINE // 8 : LINE // 8]  # [ranks]
        self.meetings = 0
        data = torch.frombuffer(memory, dtype=torch.uint8, offset=size * LINE)
        self.halves = itertools.cycle(data.view(2, size, -1).unbind(0))
        is_crowded = dist.get_world_size() > usable_cores()
        self.spin_seconds = 0.0 if is_crowded else SPIN_SECONDS
        self.timeout = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()

    def meet(self) -> None:
        """Wait for all ranks of the group. Raises RuntimeError if one has ended, or does not come
        within the group's time limit."""
        self.meetings += 1
        self.arrivals[self.rank] = self.meetings
        for rank, arrived in enumerate(self.arrivals):
            if arrived < self.meetings:
                self._wait_for(rank)

    def _wait_for(self, rank: int) -> None:
        start, (nap, longest) = time.monotonic(), NAP_SECONDS
        while self.arrivals[rank] < self.meetings:
            waited = time.monotonic() - start
            if waited < self.spin_seconds:
                os.sched_yield()
                continue
            time.sleep(nap)
            nap = min(2 * nap, longest)
            if nap == longest and self._has_ended(rank):
                if self.arrivals[rank] >= self.meetings:  # it came, and then ended
                    return
                raise RuntimeError(f"connection lost: rank {rank} of the group has ended")
            if waited > self.timeout:
                raise RuntimeError(f"rank {rank} of the group did not come in {waited:.0f} s")

    def _has_ended(self, rank: int) -> bool:
        try:
            fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        except OSError:
            return False
        fcntl.lockf(self.file, fcntl.LOCK_UN, 1, rank)  # for the others to see it
        return True


# By group; None where it has none.
_windows: WeakKeyDictionary[dist.ProcessGroup, Window | None] = WeakKeyDictionary()


def window_of(group: dist.ProcessGroup) -> Window | None:
    """None if the ranks are on several hosts, or there is not enough memory, or it is of no use.
    The first call makes it: every rank of the group calls this."""
    if group not in _windows:
        is_ordered = platform.machine() in ORDERED_PROCESSORS
        is_real = dist.get_backend(group) == "gloo"  # torch's "fake" ranks are not there
        _windows[group] = _make(group) if is_ordered and is_real else None
    return _windows[group]


def turns(group: dist.ProcessGroup, count: int, dtype: torch.dtype, rows: int) -> Iterator[tuple]:
    """Cuts `count` elements into pieces that fit into the window. For each piece: its slice, the
    memory for it [ranks, rows, elements of the piece], and the window to meet in.

    In each turn every rank writes to its place, all meet, and each reads what the others wrote. One
    half is written again in the next turn but one: by then all have met once more, so all have read
    it.
    """
    window = window_of(group)
    assert window is not None
    first = 0
    while first < count:
        half = next(window.halves)
        width = half.shape[1] // (rows * LINE) * LINE
        memory = half[:, : rows * width].view(dtype).unflatten(1, (rows, -1))
        piece = slice(first, min(first + memory.shape[2], count))
        yield piece, memory[:, :, : piece.stop - first], window
        first = piece.stop


def _make(group: dist.ProcessGroup) -> Window | None:
    """The same for all ranks of the group: None for all of them if one cannot have it."""
    dist.barrier(group)  # the first one waits here, where no file of its own could stay behind
    size, path, window = group.size(), "", None
    try:
        if group.rank() == 0:
            with contextlib.suppress(OSError):
                path = _new_file(size)
        told = [path]
        dist.broadcast_object_list(told, group=group, group_src=0)
        if told[0] and os.path.exists(told[0]):  # on another host it is not there
            with contextlib.suppress(OSError):
                window = Window(group, os.open(told[0], os.O_RDWR | os.O_CLOEXEC))
        # Megatron-Core lets torch collect all_reduce, all_gather_into_tensor and
        # reduce_scatter_tensor here, to run them later.
        has_window = torch.full((size,), window is not None)
        for source in range(size):
            dist.broadcast(has_window[source : source + 1], group=group, group_src=source)
    finally:
        if path:
            os.unlink(path)  # the memory is freed when the last rank has ended, however it ends
    return window if bool(has_window.all()) else None


def _new_file(size: int) -> str:
    """A file in memory for `size` ranks, of which every page exists. (Writing to one that the file
    system has no room for would kill the process.) Raises OSError if it would leave little room for
    others."""
    room = os.statvfs(MEMORY)
    unit = 2 * size * size * LINE  # a cache line from each rank to each, in both halves
    data = max(1, min(2 * size * size * PIECE_BYTES, MOST_BYTES) // unit) * unit
    if room.f_bavail * room.f_frsize < 4 * data:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), MEMORY)
    descriptor, path = tempfile.mkstemp(prefix="gspo-megatron-", dir=MEMORY)
    try:
        os.posix_fallocate(descriptor, 0, size * LINE + data)
    except OSError:
        os.unlink(path)
        raise
    finally:
        os.close(descriptor)
    return path
