"""Memory that the ranks of one host share: a window for each process group. A window also
synchronises the ranks of its group.

Gloo's ranks sleep until a message wakes them, which takes 1 ms on average on a virtual machine. In
a window, each rank counts the meetings to which it has come, and the other ranks poll this count.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import itertools
import mmap
import os
import platform
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from weakref import WeakKeyDictionary, finalize

import torch
import torch.distributed as dist
from torch import Tensor

from gspo_megatron.process.cores import usable_cores
from gspo_megatron.process.ranks import ranks_on_node

MEMORY = "/dev/shm"  # a file system in memory
PIECE_BYTES = 2**20  # bytes that a rank writes for each reading rank in one turn
MOST_BYTES = 32 * 2**20  # the largest window
_PREFIX = "gspo-megatron-window-"  # begins the name of a window's file
_FORGOTTEN_SECONDS = 60.0  # an older file was left by a rank that was killed
LINE = 64  # bytes of a cache line. Each rank's numbers have a line of their own
# int64 in a line. Three are used: the count of meetings, and the purposes of two meetings
WORDS = LINE // 8

# At first a waiting rank polls for this long, and yields its core after each poll. Later the rank
# sleeps between two polls, for a twentieth of the time that it has waited.
SPIN_SECONDS = 0.005
NAP_SECONDS = (5e-5, 1e-2)  # the shortest and the longest sleep

# Python has no memory barriers. On these processors other cores see writes in program order.
ORDERED_PROCESSORS = ("x86_64", "AMD64")


class Window:
    """The memory of a group. `halves` yields its two halves alternately, each [ranks, bytes]
    uint8."""

    def __init__(self, group: dist.ProcessGroup, file: int) -> None:
        """file: a descriptor, which the window closes. Raises OSError if it cannot be mapped."""
        self.file, self.rank, size = file, group.rank(), group.size()
        finalize(self, os.close, file)
        # The lock lasts until this process ends for any reason. So other ranks see whether this
        # process has ended.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, self.rank)
        memory = mmap.mmap(file, 0)
        words = memoryview(memory).cast("q")[: size * WORDS]
        self.arrivals, *self.purposes = (words[n::WORDS] for n in range(3))  # [ranks] each
        self.meetings = 0
        data = torch.frombuffer(memory, dtype=torch.uint8, offset=size * LINE)
        self.halves = itertools.cycle(data.view(2, size, -1).unbind(0))
        ranks_here = ranks_on_node() or dist.get_world_size()
        is_crowded = ranks_here > usable_cores()
        self.spin_seconds = 0.0 if is_crowded else SPIN_SECONDS
        self.global_ranks = dist.get_process_group_ranks(group)
        self.timeout = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()

    def meet(self, purpose: int) -> None:
        """Wait for all ranks of the group, which must come for the same purpose. Raises
        RuntimeError if a rank comes for another purpose, has ended, or does not come within the
        group's time limit."""
        self.meetings += 1
        # Meetings use the two words alternately. So no rank overwrites a word before all ranks have
        # come to the next meeting.
        purposes = self.purposes[self.meetings % 2]
        purposes[self.rank] = purpose
        self.arrivals[self.rank] = self.meetings
        for rank, arrived in enumerate(self.arrivals):
            if arrived < self.meetings:
                self._wait_for(rank)
            if purposes[rank] != purpose:
                number = self.global_ranks[rank]
                raise RuntimeError(f"rank {number} is in another collective, or in other sizes")

    def _wait_for(self, rank: int) -> None:
        start, (shortest, longest) = time.monotonic(), NAP_SECONDS
        while self.arrivals[rank] < self.meetings:
            waited = time.monotonic() - start
            if waited < self.spin_seconds:
                os.sched_yield()
                continue
            nap = min(max(waited / 20, shortest), longest)
            time.sleep(nap)
            if nap == longest and self._has_ended(rank):
                if self.arrivals[rank] >= self.meetings:  # the rank came, and then ended
                    return
                raise RuntimeError(f"connection lost: rank {self.global_ranks[rank]} has ended")
            if waited > self.timeout:
                number = self.global_ranks[rank]
                raise RuntimeError(f"timed out after {waited:.0f} s of waiting for rank {number}")

    def _has_ended(self, rank: int) -> bool:
        try:
            fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        except OSError:
            return False
        fcntl.lockf(self.file, fcntl.LOCK_UN, 1, rank)  # so that other ranks can test the lock, too
        return True


# By group; None for a group without a window.
_windows: WeakKeyDictionary[dist.ProcessGroup, Window | None] = WeakKeyDictionary()


def window_of(group: dist.ProcessGroup) -> Window | None:
    """Return the window of a group. Returns None if its ranks are on several hosts, if memory is
    short, or if the processor or the backend allows no window. Every rank of the group calls this,
    because the first call makes the window."""
    if group not in _windows:
        is_ordered = platform.machine() in ORDERED_PROCESSORS
        is_real = dist.get_backend(group) == "gloo"  # ranks of the backend "fake" do not exist
        _windows[group] = _make(group) if is_ordered and is_real else None
    return _windows[group]


def turns(
    group: dist.ProcessGroup, work: str, count: int, dtype: torch.dtype, rows: int
) -> Iterator[tuple[slice, Tensor, Callable[[], None]]]:
    """Cut `count` elements into pieces that fit into the window. For each piece, yield its slice,
    the memory for it [ranks, rows, elements of the piece], and the function with which the ranks
    meet.

    In each turn every rank writes to its place, all ranks meet, and each rank reads what the other
    ranks wrote. The same half is written again two turns later. By then all ranks have met once
    more, so all have read the half. `work` names the collective, so that ranks in another
    collective, or with other sizes, are detected.
    """
    window = window_of(group)
    assert window is not None
    purpose = zlib.crc32(f"{work} {count} {dtype}".encode())
    first = 0
    while first < count:
        half = next(window.halves)
        width = half.shape[1] // (rows * LINE) * LINE
        memory = half[:, : rows * width].view(dtype).unflatten(1, (rows, -1))
        piece = slice(first, min(first + memory.shape[2], count))
        yield piece, memory[:, :, : piece.stop - first], functools.partial(window.meet, purpose)
        first = piece.stop


def _make(group: dist.ProcessGroup) -> Window | None:
    """Make the window of a group, or return None on all ranks of the group if one of these ranks
    cannot use the window."""
    dist.barrier(group)  # a rank that is early waits here, before it has made a file
    size, path, window = group.size(), "", None
    try:
        if group.rank() == 0:
            with contextlib.suppress(OSError):
                path = _new_file(size)
        holder = [path]
        dist.broadcast_object_list(holder, group=group, group_src=0)
        if holder[0] and os.path.exists(holder[0]):  # other hosts do not have the file
            with contextlib.suppress(OSError):
                window = Window(group, os.open(holder[0], os.O_RDWR | os.O_CLOEXEC))
        # The ranks agree by broadcasts. Where Megatron-Core makes torch collect calls of
        # all_reduce, all_gather_into_tensor and reduce_scatter_tensor, the collected calls would
        # run too late.
        has_window = torch.full((size,), window is not None)
        for source in range(size):
            dist.broadcast(has_window[source : source + 1], group=group, group_src=source)
    finally:
        if path:
            with contextlib.suppress(FileNotFoundError):  # another run may have removed it
                os.unlink(path)  # the memory is freed when the last rank has ended, however it ends
    return window if bool(has_window.all()) else None


def _new_file(size: int) -> str:
    """Make a file in memory for `size` ranks, and allocate all of its pages. (Writing to a page for
    which the file system has no room would kill the process.) Raises OSError if the file would
    leave little room for other files."""
    _remove_forgotten()
    room = os.statvfs(MEMORY)
    unit = 2 * size * size * LINE  # a cache line for each pair of ranks, in both halves
    data = max(1, min(2 * size * size * PIECE_BYTES, MOST_BYTES) // unit) * unit
    if room.f_bavail * room.f_frsize < 4 * data:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), MEMORY)
    descriptor, path = tempfile.mkstemp(prefix=_PREFIX, dir=MEMORY)
    try:
        os.posix_fallocate(descriptor, 0, size * LINE + data)
    except OSError:
        os.unlink(path)
        raise
    finally:
        os.close(descriptor)
    return path


def _remove_forgotten() -> None:
    """Remove this user's old windows that still have names. (If the ranks of such a window were not
    killed but suspended, they cannot open the window any more, and work without one.)"""
    with os.scandir(MEMORY) as entries:
        for entry in entries:
            if not entry.name.startswith(_PREFIX):
                continue
            with contextlib.suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                is_old = time.time() - status.st_mtime > _FORGOTTEN_SECONDS
                if is_old and status.st_uid == os.getuid():
                    os.unlink(entry.path)
