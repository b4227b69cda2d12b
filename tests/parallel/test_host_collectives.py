"""Collectives through shared memory give the same results as gloo's collectives, and end in the
same way."""

from __future__ import annotations

import contextlib
import datetime
import errno
import os
import platform
import random
import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from megatron.core.distributed import param_and_grad_buffer
from megatron.core.tensor_parallel import layers, mappings
from torch.distributed.distributed_c10d import _coalescing_manager  # as in Megatron-Core

from gspo_megatron.platform.cpu import host_collectives, windows
from gspo_megatron.platform.cpu.host_collectives import COLLECTIVES
from tests.parallel.pool import Pool, RankError

SMALL_WINDOW = 2**11  # few bytes, so that a tensor needs several turns and the last turn is shorter
TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.uint8)
WIDTH = 3  # the number of elements in a row that a rank sends to another rank


def pair(name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The collective of gloo, and the collective through shared memory."""
    installed = getattr(dist, name)
    return installed.__wrapped__, installed


class Drawn:
    """A collective with random arguments, which are the same on all ranks."""

    def __init__(self, common: random.Random, group: dist.ProcessGroup) -> None:
        size, self.rank, self.group = group.size(), group.rank(), group
        self.name = common.choice(list(COLLECTIVES))
        self.in_place, self.coalesced = common.random() < 0.5, common.random() < 0.5
        operations = (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN)
        self.op = common.choice(operations)
        # rows[a][b] is the number of rows that rank a sends to rank b. With None, the collective
        # gets no numbers of rows, and every rank sends equally many rows to each rank.
        uneven = [[common.choice([0, 0, 1, 40]) for _ in range(size)] for _ in range(size)]
        self.rows = common.choice([uneven, [[4] * size] * size, None])
        rows = 4 * size if self.rows is None else sum(self.rows[self.rank])
        count = size * common.choice([0, 1, 7, 601])
        shape = (rows, WIDTH) if self.name == "all_to_all_single" else (count,)
        kind = common.choice(TYPES)
        # All values are whole numbers that are exact in bf16, so the order of a sum does not
        # matter.
        self.given = torch.randint(0, 50, shape).to(kind)

    def run(self, collective: Callable[..., Any], *, in_place: bool) -> torch.Tensor:
        """The result on this rank. in_place: the tensor with this rank's share is a part of the
        tensor with the shares of all ranks, as in Megatron-Core's buffers."""
        given, group = self.given.clone(), self.group
        if self.name == "all_reduce":
            collective(given, self.op, group=group)
            return given
        if self.name == "all_gather":
            parts = [torch.empty_like(given) for _ in range(group.size())]
            collective(parts, given, group=group)
            return torch.cat(parts)
        if self.name == "all_gather_into_tensor":
            whole = given.new_empty((group.size(), len(given)))
            share = whole[self.rank].copy_(given) if in_place else given
            collective(whole.view(-1), share, group=group)
            return whole
        if self.name == "reduce_scatter_tensor":
            share = given.view(group.size(), -1)[self.rank]
            share = share if in_place else torch.empty_like(share)
            is_joined = in_place and self.coalesced
            with _coalescing_manager(group) if is_joined else contextlib.nullcontext():
                collective(share, given, group=group)
            return share
        if self.rows is None:
            received = torch.empty_like(given)
            collective(received, given, group=group)
            return received
        sizes = [row[self.rank] for row in self.rows], self.rows[self.rank]
        received = given.new_empty((sum(sizes[0]), WIDTH))
        collective(received, given, *sizes, group=group)
        return received


def in_any_order(window_bytes: int = SMALL_WINDOW) -> tuple[list[str], int]:
    """Run the collectives in a random order. Returns the collectives whose results differ from the
    results of gloo, and the number of turns. In each turn one rank reads late, when the other ranks
    may already be in the next turn."""
    native, turns, different = windows.Window.meet, [], []
    common = random.Random(3)

    def meet(window: windows.Window, purpose: int) -> None:
        native(window, purpose)
        turns.append(None)
        if len(turns) % dist.get_world_size() == dist.get_rank():
            time.sleep(0.002)

    with (
        patch.object(windows, "MOST_BYTES", window_bytes),
        patch.object(windows.Window, "meet", meet),
    ):
        group = dist.new_group()
        for _ in range(100):
            drawn = Drawn(common, group)
            by_gloo, ours = pair(drawn.name)
            expected = drawn.run(by_gloo, in_place=False)
            if not torch.equal(drawn.run(ours, in_place=drawn.in_place), expected):
                different.append(f"{drawn.name} {drawn.op} {drawn.given.dtype}")
    return different, len(turns)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_results_are_gloos(pool: Pool, size: int) -> None:
    for different, turns in pool.run(size, in_any_order):
        assert different == []
        assert turns > 200 if size > 1 else turns == 0


def test_a_tensor_that_fits_takes_one_turn(pool: Pool) -> None:
    for different, turns in pool.run(2, in_any_order, window_bytes=windows.MOST_BYTES):
        assert different == [] and turns < 130


# The inputs of all ranks: [ranks, elements].
GIVEN = [[1.0, 5.0, 2.0, 4.0], [3.0, 2.0, 2.0, 1.0]]
RESULTS = {
    "SUM": [4.0, 7.0, 4.0, 5.0],
    "MAX": [3.0, 5.0, 2.0, 4.0],
    "MIN": [1.0, 2.0, 2.0, 1.0],
    # shared memory supports no product, and for a scatter only SUM
    "PRODUCT": [3.0, 10.0, 4.0, 4.0],
}


def reduced() -> dict[str, tuple[list[float], list[float]]]:
    """The results of all_reduce, and the share of this rank in the results of reduce_scatter."""
    found = {}
    for name in RESULTS:
        op, given = getattr(dist.ReduceOp, name), torch.tensor(GIVEN[dist.get_rank()])
        whole, share = given.clone(), torch.empty(2)
        dist.all_reduce(whole, op)
        dist.reduce_scatter_tensor(share, given.clone(), op=op)
        found[name] = whole.tolist(), share.tolist()
    return found


def test_each_operation_gives_what_was_computed_by_hand(pool: Pool) -> None:
    first, second = pool.run(2, reduced)
    assert first == {name: (whole, whole[:2]) for name, whole in RESULTS.items()}
    assert second == {name: (whole, whole[2:]) for name, whole in RESULTS.items()}
    with pytest.raises(AssertionError, match="reduce_scatter by"):
        group: Any = None  # the group is not used, because the operation is checked first
        host_collectives.reduce_scatter_tensor(
            group, torch.empty(2), torch.ones(4), dist.ReduceOp.MAX
        )


REASONS = ("no such file system", "full", "others need the rest", "two hosts", "other processor")


def without_window(reason: str, folder: str) -> tuple[list[str], int]:
    """Run `in_any_order` on ranks that cannot share a window for this reason."""
    refused = OSError(errno.ENOSPC, "No space left on device")
    little_room = SimpleNamespace(f_bavail=4 * SMALL_WINDOW - 1, f_frsize=1)
    patches = {
        "no such file system": lambda: patch.object(windows, "MEMORY", "/does/not/exist"),
        "full": lambda: patch.object(os, "posix_fallocate", side_effect=refused),
        "others need the rest": lambda: patch.object(os, "statvfs", return_value=little_room),
        # A rank on another host has a different file system in memory.
        "two hosts": lambda: patch.object(os.path, "exists", return_value=dist.get_rank() == 0),
        "other processor": lambda: patch.object(platform, "machine", return_value="aarch64"),
    }
    with patch.object(windows, "MEMORY", folder), patches[reason]():
        return in_any_order()


@pytest.fixture
def folder() -> Iterator[str]:
    """A folder in memory that only the test uses."""
    with tempfile.TemporaryDirectory(dir=windows.MEMORY) as name:
        yield name


@pytest.mark.parametrize("reason", REASONS)
def test_without_shared_memory_gloo_exchanges(pool: Pool, reason: str, folder: str) -> None:
    assert pool.run(2, without_window, reason=reason, folder=folder) == [([], 0)] * 2
    assert os.listdir(folder) == []


def files_of_a_window(folder: str) -> tuple[list[str], bool]:
    with patch.object(windows, "MEMORY", folder):
        group = dist.new_group()
        dist.all_reduce(torch.ones(3), group=group)
        return os.listdir(folder), windows.window_of(group) is not None


def test_a_window_has_no_name_that_could_stay_behind(pool: Pool, folder: str) -> None:
    assert pool.run(2, files_of_a_window, folder=folder) == [([], True)] * 2


def killed_rank(crowded: bool) -> None:
    with patch.object(windows, "usable_cores", return_value=1 if crowded else 64):
        group = dist.new_group()
        dist.all_reduce(torch.ones(3), group=group)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"connection lost: rank 1 has ended"):
        dist.all_reduce(torch.ones(3), group=group)
    raise AssertionError(f"noticed: {time.monotonic() - start < 10}")


@pytest.mark.parametrize("crowded", [False, True])
def test_a_rank_that_is_killed_is_noticed(pool: Pool, crowded: bool) -> None:
    with pytest.raises(RankError, match="noticed: True"):
        pool.run(2, killed_rank, crowded=crowded)


def rank_that_does_not_come() -> str:
    group = dist.new_group()
    dist.all_reduce(torch.ones(3), group=group)
    window = windows.window_of(group)
    assert window is not None and window.timeout > 60
    if dist.get_rank() == 1:
        dist.barrier()  # this barrier goes through gloo, in another group
        return ""
    window.timeout = 0.2
    with pytest.raises(RuntimeError) as caught:
        dist.all_reduce(torch.ones(3), group=group)
    dist.barrier()
    return str(caught.value)


def test_waiting_has_the_time_limit_of_the_group(pool: Pool) -> None:
    first, second = pool.run(2, rank_that_does_not_come)
    assert re.fullmatch(r"timed out after \d+ s of waiting for rank 1", first) and second == ""


def in_other_collectives() -> list[str]:
    """The errors that a rank gets if its collective and the collective of the other rank differ in
    size, type, operation or kind."""
    rank, messages = dist.get_rank(), []
    kind, op = [(torch.float32, dist.ReduceOp.SUM), (torch.int32, dist.ReduceOp.MAX)][rank]
    cases: list[Callable[..., Any]] = [
        lambda group: dist.all_reduce(torch.ones(10 - 3 * rank), group=group),
        lambda group: dist.all_reduce(torch.ones(4).to(kind), group=group),
        lambda group: dist.all_reduce(torch.ones(4), op, group=group),
        lambda group: (
            dist.all_gather_into_tensor(torch.ones(8), torch.ones(4), group=group)
            if rank
            else dist.all_reduce(torch.ones(4), group=group)
        ),
    ]
    for case in cases:
        group = dist.new_group()
        dist.all_reduce(torch.ones(3), group=group)
        with pytest.raises(RuntimeError) as caught:
            case(group)
        messages.append(str(caught.value))
    return messages


def test_ranks_that_do_different_things_are_told(pool: Pool) -> None:
    """gloo also reports most of these mistakes. Without a check, a rank would add up data that an
    earlier collective has left in the shared memory."""
    assert pool.run(2, in_other_collectives) == [
        [f"rank {other} is in another collective, or in other sizes"] * 4 for other in (1, 0)
    ]


def in_background(size: int) -> bool:
    """Whether an asynchronous collective returns a handle that can be waited for."""
    whole = torch.full((6,), dist.get_rank() + 1.0)
    share, total = torch.empty(6 // size), whole.clone()
    dist.reduce_scatter_tensor(share, whole, async_op=True).wait()
    dist.all_reduce(total, async_op=True).wait()
    return bool((torch.cat([share, total]) == size * (size + 1) / 2).all())


@pytest.mark.parametrize("size", [1, 2])
def test_work_in_the_background_is_left_to_gloo(pool: Pool, size: int) -> None:
    assert pool.run(size, in_background, size=size) == [True] * size


def outside() -> list[float]:
    """The values of a rank's tensor after a reduction in a group that contains only rank 1."""
    group = dist.new_group([1])
    numbers = torch.full((2,), 3.0)
    dist.all_reduce(numbers, group=group)
    return numbers.tolist()


@pytest.mark.filterwarnings("ignore:Running all_reduce on global rank")
def test_a_rank_outside_of_the_group_does_nothing(pool: Pool) -> None:
    assert pool.run(2, outside) == [[3.0, 3.0]] * 2


def threads_started(by_gloo: bool) -> int:
    """The number of threads that a single rank starts to gather 16 MB. The rank's OpenMP threads
    have started before."""
    torch.set_num_threads(2)
    whole = torch.ones(2**22).mul(2.0)
    before = len(os.listdir("/proc/self/task"))
    native, ours = pair("all_gather_into_tensor")
    (native if by_gloo else ours)(whole, whole, group=dist.group.WORLD)
    return len(os.listdir("/proc/self/task")) - before


def test_a_rank_alone_starts_no_second_team_of_threads(pool: Pool) -> None:
    """With more threads than cores, libgomp lets no team of threads spin, which slows down all
    later operations."""
    assert pool.run(1, threads_started, by_gloo=False) == [0]
    assert pool.run(1, threads_started, by_gloo=True) == [1]


def gloo_threads() -> tuple[int, float]:
    """The number of threads of gloo's devices in this process, and the timeout of the last
    group."""
    groups = [dist.new_group(timeout=datetime.timedelta(seconds=60 + n)) for n in range(5)]
    for group in groups:
        dist.barrier(group)
    threads = [Path(f"/proc/self/task/{n}/comm").read_text() for n in os.listdir("/proc/self/task")]
    options = groups[-1]._get_backend(torch.device("cpu")).options
    return threads.count("gloo_tcp_loop\n"), options._timeout.total_seconds()


@pytest.mark.parametrize("size", [1, 2])
def test_all_groups_share_the_thread_of_gloos_device(pool: Pool, size: int) -> None:
    assert pool.run(size, gloo_threads) == [(1, 64.0)] * size


def names_in_megatron() -> list[str]:
    """The names in Megatron-Core that should refer to an installed function but do not, and the
    collectives for which no function is installed."""
    others = [
        f"{module.__name__}.{name}"
        for module, name, collective in (
            (param_and_grad_buffer, "dist_all_gather_func", "all_gather_into_tensor"),
            (param_and_grad_buffer, "dist_reduce_scatter_func", "reduce_scatter_tensor"),
            (mappings, "dist_all_gather_func", "all_gather_into_tensor"),
            (mappings, "dist_reduce_scatter_func", "reduce_scatter_tensor"),
            (layers, "dist_all_gather_func", "all_gather_into_tensor"),
        )
        if getattr(module, name) is not getattr(dist, collective)
    ]
    return others + [name for name in COLLECTIVES if len(set(pair(name))) == 1]


def test_megatron_core_uses_them_under_its_own_names(pool: Pool) -> None:
    """This is tested on a rank, where the package is imported first. In the pytest process, the
    imports of the test file come first."""
    assert pool.run(1, names_in_megatron) == [[]]
