"""Shares of gradients and weights on CPUs: gathered and summed as by gloo."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from gspo_megatron.platform import shares
from gspo_megatron.platform.shares import gathering, summing
from tests.parallel.pool import Pool

ELEMENTS = 6 * 601  # of a buffer; a share is cut into several pieces, of which the last is shorter


def exchange(dtype: torch.dtype) -> tuple[list[bool], float]:
    """Whether gathered shares are gloo's, in place and elsewhere; and the largest difference of the
    sums from those in float64."""
    rank, size, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    shares.WINDOW_BYTES = 2**11  # small: a share takes several turns
    drawn = torch.randn((size, ELEMENTS), generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = drawn.double().sum(0).view(size, -1)[rank]
    joined = torch.empty(ELEMENTS, dtype=dtype)
    equal, error = [], 0.0
    gather, scatter = dist.all_gather_into_tensor, dist.reduce_scatter_tensor
    for in_place in (True, False):  # as in Megatron's buffers, and elsewhere
        whole = drawn[rank].clone()
        share = whole.view(size, -1)[rank] if in_place else torch.empty(ELEMENTS // size).to(dtype)
        summing(scatter)(share, whole, group=group, op=dist.ReduceOp.SUM)
        error = max(error, float((share.double() - expected).abs().max()))
        gather(joined, share.clone())
        for target in (torch.empty(ELEMENTS, dtype=dtype), whole):
            gathering(gather)(target, share, group=group, async_op=False)
            equal.append(torch.equal(target, joined))
    return equal, error


@pytest.mark.parametrize("size", [1, 2, 3])
def test_shares_and_sums(pool: Pool, size: int) -> None:
    for equal, error in pool.run(size, exchange, dtype=torch.float32):
        assert equal == [True] * 4
        assert error < 1e-6
    for equal, error in pool.run(size, exchange, dtype=torch.bfloat16):
        assert equal == [True] * 4
        assert error < 0.05  # two roundings to 8 bits, of sums up to 4


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
