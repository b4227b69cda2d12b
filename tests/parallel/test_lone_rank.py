"""Collectives of gradients and weights where a rank has no others to exchange them with."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from gspo_megatron.platform.megatron_cpu import unless_alone
from tests.parallel.pool import Pool


def exchange() -> list[bool]:
    """Whether shares and sums are gloo's, in place and elsewhere."""
    rank, size, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    gather, scatter = dist.all_gather_into_tensor, dist.reduce_scatter_tensor
    whole = torch.randn(6, generator=torch.Generator().manual_seed(rank))
    given, expected, joined = whole.clone(), torch.empty(6 // size), torch.empty(6)
    scatter(expected, given)
    gather(joined, expected)
    found = []
    for share in (whole.view(size, -1)[rank], torch.empty(6 // size)):  # as in Megatron's buffers
        unless_alone(scatter)(share, given.clone(), group=group, op=dist.ReduceOp.SUM)
        found.append(torch.equal(share, expected))
        for target in (torch.empty(6), whole.clone()):
            unless_alone(gather)(target, share, group=group, async_op=False)
            found.append(torch.equal(target, joined))
    return found


@pytest.mark.parametrize("size", [1, 2, 3])
def test_shares_and_sums_are_those_of_gloo(pool: Pool, size: int) -> None:
    assert pool.run(size, exchange) == [[True] * 6] * size


def threads_started(by_gloo: bool) -> int:
    """By a rank alone that gathers 16 MB, after its own OpenMP threads have started."""
    torch.set_num_threads(2)
    whole = torch.ones(2**22).mul(2.0)
    before = len(os.listdir("/proc/self/task"))
    native = dist.all_gather_into_tensor
    gather = native if by_gloo else unless_alone(native)
    gather(whole, whole, group=dist.group.WORLD)
    return len(os.listdir("/proc/self/task")) - before


def test_a_rank_alone_starts_no_second_team_of_threads(pool: Pool) -> None:
    """libgomp lets the threads of no team spin when there are more than cores: all operations that
    follow take longer."""
    assert pool.run(1, threads_started, by_gloo=False) == [0]
    assert pool.run(1, threads_started, by_gloo=True) == [1]
