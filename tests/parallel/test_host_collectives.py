"""Collectives by shared memory do what gloo's do, and end as they do."""

from __future__ import annotations

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
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from megatron.core.distributed import param_and_grad_buffer
from megatron.core.tensor_parallel import layers, mappings
from torch.distributed.distributed_c10d import _coalescing_manager  # as in Megatron-Core

from gspo_megatron.platform.cpu import windows
from gspo_megatron.platform.cpu.host_collectives import COLLECTIVES
from tests.parallel.pool import Pool, RankError

ELEMENTS = 6 * 601  # of a buffer
SMALL_WINDOW = 2**11  # bytes: tensors take several turns, of which the last is shorter


def pair(name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The collective of gloo, and the one by shared memory."""
    installed = getattr(dist, name)
    return installed.__wrapped__, installed


def exchange(dtype: torch.dtype) -> tuple[list[bool], float]:
    """Whether gathered shares are gloo's, in place and elsewhere; and the largest difference of the
    sums from those in float64."""
    rank, size, group = dist.get_rank(), dist.get_world_size(), dist.new_group()
    drawn = torch.randn((size, ELEMENTS), generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = drawn.double().sum(0).view(size, -1)[rank]
    joined = torch.empty(ELEMENTS, dtype=dtype)
    equal, error = [], 0.0
    by_gloo, gather = pair("all_gather_into_tensor")
    for in_place in (True, False):  # as in Megatron's buffers, and elsewhere
        whole = drawn[rank].clone()
        share = whole.view(size, -1)[rank] if in_place else torch.empty(ELEMENTS // size).to(dtype)
        with _coalescing_manager(group):
            dist.reduce_scatter_tensor(share, whole, group=group, op=dist.ReduceOp.SUM)
        error = max(error, float((share.double() - expected).abs().max()))
        by_gloo(joined, share.clone())
        for target in (torch.empty(ELEMENTS, dtype=dtype), whole):
            gather(target, share, group=group, async_op=False)
            equal.append(torch.equal(target, joined))
    return equal, error


def small_exchange(dtype: torch.dtype) -> tuple[list[bool], float]:
    with patch.object(windows, "MOST_BYTES", SMALL_WINDOW):
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


def reductions_and_lists(small: bool) -> list[tuple[str, bool]]:
    """Which results are gloo's. Numbers are whole, so that no order of a sum matters."""
    size, rank = dist.get_world_size(), dist.get_rank()
    found = []
    with patch.object(windows, "MOST_BYTES", SMALL_WINDOW if small else windows.MOST_BYTES):
        group = dist.new_group()
        for shape in ((), (0,), (7,), (601, 3)):
            for dtype in (torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8):
                numbers = torch.randint(0, 50, shape).add(rank).to(dtype)
                for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN):
                    ours, theirs = numbers.clone(), numbers.clone()
                    for reduce, target in zip(pair("all_reduce"), (theirs, ours)):
                        reduce(target, op, group=group)
                    found.append((f"{op} {dtype} {shape}", torch.equal(ours, theirs)))
                ours, theirs = ([torch.empty_like(numbers) for _ in range(size)] for _ in "ab")
                for gather, target in zip(pair("all_gather"), (theirs, ours)):
                    gather(target, numbers, group=group)
                found.append((f"list {dtype} {shape}", all(map(torch.equal, ours, theirs))))
    return found


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("size", [1, 3])
def test_reductions_and_lists(pool: Pool, size: int, small: bool) -> None:
    for found in pool.run(size, reductions_and_lists, small=small):
        assert len(found) == 80
        assert [name for name, is_equal in found if not is_equal] == []


def all_to_all(small: bool) -> list[bool]:
    """Whether rows that ranks send each other are gloo's: uneven, none at all, even."""
    size, rank = dist.get_world_size(), dist.get_rank()
    uneven = [[(3 * a + 5 * b) % 7 * (a != 1) for b in range(size)] for a in range(size)]
    equal = []
    with patch.object(windows, "MOST_BYTES", SMALL_WINDOW if small else windows.MOST_BYTES):
        group = dist.new_group()
        for counts in (uneven, [[0] * size] * size, [[4] * size] * size):
            sent, received = counts[rank], [row[rank] for row in counts]
            states = torch.randn((sum(sent), 701))
            ours, theirs = (states.new_empty((sum(received), 701)) for _ in "ab")
            for send, target in zip(pair("all_to_all_single"), (theirs, ours)):
                send(target, states, received, sent, group=group)
            equal.append(torch.equal(ours, theirs))
        send(ours, states, group=group)  # without sizes, as the last ones are even
        return [*equal, torch.equal(ours, theirs)]


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_rows_to_each_rank(pool: Pool, size: int, small: bool) -> None:
    assert pool.run(size, all_to_all, small=small) == [[True] * 4] * size


def late_readers(work: Callable[..., Any], **options: Any) -> Any:
    """One rank reads late what the others wrote; they are then a turn further on."""
    native, turns = windows.Window.meet, []

    def meet(window: windows.Window, purpose: int) -> None:
        native(window, purpose)
        turns.append(None)
        if len(turns) % dist.get_world_size() == dist.get_rank():
            time.sleep(0.005)

    with (
        patch.object(windows, "MOST_BYTES", SMALL_WINDOW),
        patch.object(windows.Window, "meet", meet),
    ):
        found = work(**options)
    assert len(turns) > 20
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_nobody_writes_over_what_others_have_not_read(pool: Pool, size: int) -> None:
    for equal, error in pool.run(size, late_readers, work=exchange, dtype=torch.float32):
        assert equal == [True] * 4 and error < 1e-6
    assert pool.run(size, late_readers, work=all_to_all, small=True) == [[True] * 4] * size


REASONS = ("no such file system", "full", "others need the rest", "two hosts", "other processor")


def free_bytes(folder: str) -> int:
    room = os.statvfs(folder)
    return room.f_bavail * room.f_frsize


def without_window(reason: str, folder: str) -> tuple[list[bool], float, bool]:
    """`exchange` where no window can be had, and whether there was none."""
    refused = OSError(errno.ENOSPC, "No space left on device")
    patches = {
        "no such file system": lambda: patch.object(windows, "MEMORY", "/does/not/exist"),
        "full": lambda: patch.object(os, "posix_fallocate", side_effect=refused),
        "others need the rest": lambda: patch.multiple(
            windows, PIECE_BYTES=2**50, MOST_BYTES=free_bytes(folder) // 3
        ),
        # as a rank on another host, which has a file system in memory of its own
        "two hosts": lambda: patch.object(os.path, "exists", return_value=dist.get_rank() == 0),
        "other processor": lambda: patch.object(platform, "machine", return_value="aarch64"),
    }
    native, made = windows._make, []

    def make(group: dist.ProcessGroup) -> windows.Window | None:
        made.append(native(group))
        return made[-1]

    with (
        patch.object(windows, "MEMORY", folder),
        patch.object(windows, "_make", make),
        patches[reason](),
    ):
        return *exchange(torch.float32), all(window is None for window in made)


@pytest.fixture
def folder() -> Iterator[str]:
    """A folder in memory, which nobody else writes to."""
    with tempfile.TemporaryDirectory(dir=windows.MEMORY) as name:
        yield name


@pytest.mark.parametrize("reason", REASONS)
def test_without_shared_memory_gloo_exchanges(pool: Pool, reason: str, folder: str) -> None:
    for equal, error, is_without in pool.run(2, without_window, reason=reason, folder=folder):
        assert equal == [True] * 4 and error < 1e-6
        assert is_without
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
        dist.barrier()  # by gloo, of another group
        return ""
    window.timeout = 0.2
    with pytest.raises(RuntimeError) as caught:
        dist.all_reduce(torch.ones(3), group=group)
    dist.barrier()
    return str(caught.value)


def test_waiting_has_the_time_limit_of_the_group(pool: Pool) -> None:
    first, second = pool.run(2, rank_that_does_not_come)
    assert re.fullmatch(r"timed out after \d+ s of waiting for rank 1", first) and second == ""


def in_any_order() -> list[bool]:
    """Whether all kinds of collectives, in an order and in sizes drawn at random, are gloo's."""
    size, rank = dist.get_world_size(), dist.get_rank()
    common = random.Random(3)  # the same on all ranks
    equal = []
    with patch.object(windows, "MOST_BYTES", SMALL_WINDOW):
        group = dist.new_group()
        for _ in range(60):
            name, count = common.choice(list(COLLECTIVES)), size * common.randint(1, 400)
            kind = common.choice([torch.float32, torch.float64, torch.int32])
            own = torch.randint(0, 99, (count,)).to(kind)
            results = []
            for run in pair(name):
                if name == "all_reduce":
                    results.append(own.clone())
                    run(results[-1], group=group)
                elif name == "all_gather":
                    parts = [torch.empty_like(own) for _ in range(size)]
                    run(parts, own, group=group)
                    results.append(torch.cat(parts))
                else:
                    sizes = {"all_gather_into_tensor": count * size, "all_to_all_single": count}
                    results.append(own.new_empty(sizes.get(name, count // size)))
                    run(results[-1], own, group=group)
            equal.append(torch.equal(*results))
            if common.randrange(size) == rank:
                time.sleep(0.002)
    return equal


@pytest.mark.parametrize("size", [2, 3])
def test_all_kinds_one_after_the_other(pool: Pool, size: int) -> None:
    assert pool.run(size, in_any_order) == [[True] * 60] * size


def in_other_collectives(case: str) -> str:
    group, rank = dist.new_group(), dist.get_rank()
    dist.all_reduce(torch.ones(3), group=group)
    with pytest.raises(RuntimeError) as caught:
        if case == "sizes":
            dist.all_reduce(torch.ones(10 - 3 * rank), group=group)
        elif case == "types":
            dist.all_reduce(torch.ones(4).to([torch.float32, torch.int32][rank]), group=group)
        elif case == "operations":
            dist.all_reduce(torch.ones(4), [dist.ReduceOp.SUM, dist.ReduceOp.MAX][rank], group)
        elif rank == 0:
            dist.all_reduce(torch.ones(4), group=group)
        else:
            dist.all_gather_into_tensor(torch.ones(8), torch.ones(4), group=group)
    return str(caught.value)


@pytest.mark.parametrize("case", ["sizes", "types", "operations", "collectives"])
def test_ranks_that_do_different_things_are_told(pool: Pool, case: str) -> None:
    """gloo stops at most of them, too; without a check they would add up what an earlier collective
    left in the memory."""
    messages = pool.run(2, in_other_collectives, case=case)
    assert messages == [
        f"rank {other} is in another collective, or in other sizes" for other in (1, 0)
    ]


def in_background(size: int) -> bool:
    """Whether work that is waited for later comes back as a handle to wait for."""
    whole = torch.full((6,), dist.get_rank() + 1.0)
    share, total = torch.empty(6 // size), whole.clone()
    dist.reduce_scatter_tensor(share, whole, async_op=True).wait()
    dist.all_reduce(total, async_op=True).wait()
    return bool((torch.cat([share, total]) == size * (size + 1) / 2).all())


@pytest.mark.parametrize("size", [1, 2])
def test_work_in_the_background_is_left_to_gloo(pool: Pool, size: int) -> None:
    assert pool.run(size, in_background, size=size) == [True] * size


def outside() -> list[float]:
    """What a rank has after a reduction in a group of the others."""
    group = dist.new_group([1])
    numbers = torch.full((2,), 3.0)
    dist.all_reduce(numbers, group=group)
    return numbers.tolist()


@pytest.mark.filterwarnings("ignore:Running all_reduce on global rank")
def test_a_rank_outside_of_the_group_does_nothing(pool: Pool) -> None:
    assert pool.run(2, outside) == [[3.0, 3.0]] * 2


def threads_started(by_gloo: bool) -> int:
    """By a rank alone that gathers 16 MB, after its own OpenMP threads have started."""
    torch.set_num_threads(2)
    whole = torch.ones(2**22).mul(2.0)
    before = len(os.listdir("/proc/self/task"))
    native, ours = pair("all_gather_into_tensor")
    (native if by_gloo else ours)(whole, whole, group=dist.group.WORLD)
    return len(os.listdir("/proc/self/task")) - before


def test_a_rank_alone_starts_no_second_team_of_threads(pool: Pool) -> None:
    """libgomp lets the threads of no team spin when there are more than cores: all operations that
    follow take longer."""
    assert pool.run(1, threads_started, by_gloo=False) == [0]
    assert pool.run(1, threads_started, by_gloo=True) == [1]


def gloo_threads() -> tuple[int, float]:
    """The threads of gloo's devices in this process, and the time limit of its last group."""
    groups = [dist.new_group(timeout=datetime.timedelta(seconds=60 + n)) for n in range(5)]
    for group in groups:
        dist.barrier(group)
    threads = [Path(f"/proc/self/task/{n}/comm").read_text() for n in os.listdir("/proc/self/task")]
    options = groups[-1]._get_backend(torch.device("cpu")).options
    return threads.count("gloo_tcp_loop\n"), options._timeout.total_seconds()


@pytest.mark.parametrize("size", [1, 2])
def test_all_groups_share_the_thread_of_gloos_device(pool: Pool, size: int) -> None:
    assert pool.run(size, gloo_threads) == [(1, 64.0)] * size


def test_megatron_core_uses_them_under_its_own_names() -> None:
    for module, name, collective in (
        (param_and_grad_buffer, "dist_all_gather_func", "all_gather_into_tensor"),
        (param_and_grad_buffer, "dist_reduce_scatter_func", "reduce_scatter_tensor"),
        (mappings, "dist_all_gather_func", "all_gather_into_tensor"),
        (mappings, "dist_reduce_scatter_func", "reduce_scatter_tensor"),
        (layers, "dist_all_gather_func", "all_gather_into_tensor"),
    ):
        assert getattr(module, name) is getattr(dist, collective)
    for name in COLLECTIVES:
        native, ours = pair(name)
        assert native is not ours
