"""Shares of gradients and weights on CPUs: gathered and summed as by gloo."""

from __future__ import annotations

import errno
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager  # as in Megatron-Core

from gspo_megatron.platform import shares
from gspo_megatron.platform.shares import gathering, summing
from tests.parallel.pool import Pool

ELEMENTS = 6 * 601  # of a buffer
SMALL_WINDOW = 2**11  # bytes: a share takes several turns, of which the last is shorter


def exchange(dtype: torch.dtype) -> tuple[list[bool], float]:
    """Whether gathered shares are gloo's, in place and elsewhere; and the largest difference of the
    sums from those in float64."""
    rank, size, group = dist.get_rank(), dist.get_world_size(), dist.new_group()
    drawn = torch.randn((size, ELEMENTS), generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = drawn.double().sum(0).view(size, -1)[rank]
    joined = torch.empty(ELEMENTS, dtype=dtype)
    equal, error = [], 0.0
    gather, scatter = dist.all_gather_into_tensor, dist.reduce_scatter_tensor
    for in_place in (True, False):  # as in Megatron's buffers, and elsewhere
        whole = drawn[rank].clone()
        share = whole.view(size, -1)[rank] if in_place else torch.empty(ELEMENTS // size).to(dtype)
        with _coalescing_manager(group):
            summing(scatter)(share, whole, group=group, op=dist.ReduceOp.SUM)
        error = max(error, float((share.double() - expected).abs().max()))
        gather(joined, share.clone())
        for target in (torch.empty(ELEMENTS, dtype=dtype), whole):
            gathering(gather)(target, share, group=group, async_op=False)
            equal.append(torch.equal(target, joined))
    return equal, error


def small_exchange(dtype: torch.dtype) -> tuple[list[bool], float]:
    with patch.object(shares, "WINDOW_BYTES", SMALL_WINDOW):
        return exchange(dtype)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("work", [exchange, small_exchange])
def test_shares_and_sums(pool: Pool, size: int, work: Callable[..., tuple]) -> None:
    for equal, error in pool.run(size, work, dtype=torch.float32):
        assert equal == [True] * 4
        assert error < 1e-6
    for equal, error in pool.run(size, work, dtype=torch.bfloat16):
        assert equal == [True] * 4
        assert error < 0.05  # two roundings to 8 bits, of sums up to 4


def late_readers() -> tuple[list[bool], float]:
    """One rank reads late what the others wrote; they are then a turn further on."""
    native, turns = dist.barrier, []

    def meet(group: dist.ProcessGroup) -> None:
        native(group)
        turns.append(None)
        if len(turns) % dist.get_world_size() == dist.get_rank():
            time.sleep(0.005)

    with patch.object(shares, "WINDOW_BYTES", SMALL_WINDOW), patch.object(dist, "barrier", meet):
        found = exchange(torch.float32)
    assert len(turns) > 20
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_nobody_writes_over_what_others_have_not_read(pool: Pool, size: int) -> None:
    for equal, error in pool.run(size, late_readers):
        assert equal == [True] * 4 and error < 1e-6


REASONS = ("no such file system", "full", "others need the rest", "two hosts")


def free_bytes(folder: str) -> int:
    room = os.statvfs(folder)
    return room.f_bavail * room.f_frsize


def without_window(reason: str, folder: str) -> tuple[list[bool], float, int]:
    """`exchange` where no window can be had, and how often ranks met for one."""
    refused = OSError(errno.ENOSPC, "No space left on device")
    patches = {
        "no such file system": lambda: patch.object(shares, "MEMORY", "/does/not/exist"),
        "full": lambda: patch.object(os, "posix_fallocate", side_effect=refused),
        "others need the rest": lambda: patch.object(
            shares, "WINDOW_BYTES", free_bytes(folder) // 3
        ),
        # as a rank on another host, which has a file system in memory of its own
        "two hosts": lambda: patch.object(os.path, "exists", return_value=dist.get_rank() == 0),
    }
    met = patch.object(dist, "barrier", wraps=dist.barrier)
    with patch.object(shares, "MEMORY", folder), patches[reason](), met as barrier:
        return *exchange(torch.float32), barrier.call_count


@pytest.fixture
def folder() -> Iterator[str]:
    """A folder in memory, which nobody else writes to."""
    with tempfile.TemporaryDirectory(dir=shares.MEMORY) as name:
        yield name


@pytest.mark.parametrize("reason", REASONS)
def test_without_shared_memory_gloo_exchanges(pool: Pool, reason: str, folder: str) -> None:
    for equal, error, met in pool.run(2, without_window, reason=reason, folder=folder):
        assert equal == [True] * 4 and error < 1e-6
        assert met == 1  # before they looked for memory
    assert os.listdir(folder) == []


def files_of_a_window(folder: str) -> list[str]:
    with patch.object(shares, "MEMORY", folder):
        exchange(torch.float32)
        return os.listdir(folder)


def test_a_window_has_no_name_that_could_stay_behind(pool: Pool, folder: str) -> None:
    assert pool.run(2, files_of_a_window, folder=folder) == [[], []]


def in_background(size: int) -> bool:
    """Whether work that Megatron-Core waits for later comes back as a handle to wait for."""
    whole = torch.full((6,), dist.get_rank() + 1.0)
    share = torch.empty(6 // size)
    work = summing(dist.reduce_scatter_tensor)(share, whole, group=dist.group.WORLD, async_op=True)
    work.wait()
    return bool((share == size * (size + 1) / 2).all())


def test_work_in_the_background_is_left_to_gloo(pool: Pool) -> None:
    assert pool.run(2, in_background, size=2) == [True] * 2


def threads_started(by_gloo: bool) -> int:
    """By a rank alone that gathers 16 MB, after its own OpenMP threads have started."""
    torch.set_num_threads(2)
    whole = torch.ones(2**22).mul(2.0)
    before = len(os.listdir("/proc/self/task"))
    native = dist.all_gather_into_tensor
    gather = native if by_gloo else gathering(native)
    gather(whole, whole, group=dist.group.WORLD)
    return len(os.listdir("/proc/self/task")) - before


def test_a_rank_alone_starts_no_second_team_of_threads(pool: Pool) -> None:
    """libgomp lets the threads of no team spin when there are more than cores: all operations that
    follow take longer."""
    assert pool.run(1, threads_started, by_gloo=False) == [0]
    assert pool.run(1, threads_started, by_gloo=True) == [1]
