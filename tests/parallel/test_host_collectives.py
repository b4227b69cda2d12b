"""Collectives through the memory of the machine, against gloo's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from gspo_megatron.platform import host_collectives
from tests.parallel.pool import Pool

COUNTS = (6 * 2**14, 6 * 2**16, 6)  # grows; the last one is too small for it


def exchange(folder: str, elsewhere: bool = False) -> list[str]:
    """What differs from gloo's. elsewhere: the last rank cannot see the folder of the others."""
    rank, size, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    host_collectives.FOLDER = folder
    if elsewhere and rank == size - 1:
        host_collectives.FOLDER = f"{folder}/missing"
    all_gather = host_collectives.all_gather_through_memory(dist.all_gather_into_tensor)
    reduce_scatter = host_collectives.reduce_scatter_through_memory(dist.reduce_scatter_tensor)
    wrong = []
    for number, count in enumerate(COUNTS):
        whole = torch.randn(count, generator=torch.Generator().manual_seed(10 * rank + number))
        expected = torch.empty(count // size)
        dist.reduce_scatter_tensor(expected, whole.clone())
        share = whole.view(size, -1)[rank]  # in place, as in the buffers of gradients
        reduce_scatter(share, whole, group=group)
        if not torch.allclose(share, expected, atol=1e-6):
            wrong.append(f"sum of {count}")
        gathered, joined = torch.empty(count), torch.empty(count)
        dist.all_gather_into_tensor(gathered, share)
        for target in (joined, whole):
            all_gather(target, share, group=group)
            if not torch.equal(target, gathered):
                wrong.append(f"gathered {count}")
    memory = host_collectives._memories.get(group)
    uses_it = memory is not None and len(memory.buffers) == size
    if uses_it != (size > 1 and not elsewhere):
        wrong.append(f"memory: {uses_it}")
    return wrong + os.listdir(folder)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_memory_carries_what_gloo_carries_and_leaves_no_file(
    pool: Pool, size: int, tmp_path: Path
) -> None:
    assert pool.run(size, exchange, folder=str(tmp_path)) == [[]] * size


def test_gloo_takes_over_where_a_rank_has_no_part_in_the_memory(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(2, exchange, folder=str(tmp_path), elsewhere=True) == [[]] * 2


def threads_started(by_gloo: bool) -> int:
    """By a rank alone that gathers 16 MB, after its own OpenMP threads have started."""
    torch.set_num_threads(2)
    whole = torch.ones(2**22).mul(2.0)
    before = len(os.listdir("/proc/self/task"))
    native = dist.all_gather_into_tensor
    gather = native if by_gloo else host_collectives.all_gather_through_memory(native)
    gather(whole, whole, group=dist.group.WORLD)
    return len(os.listdir("/proc/self/task")) - before


def test_a_rank_alone_starts_no_second_team_of_threads(pool: Pool) -> None:
    """libgomp lets the threads of no team spin when there are more than cores: all operations that
    follow take longer."""
    assert pool.run(1, threads_started, by_gloo=False) == [0]
    assert pool.run(1, threads_started, by_gloo=True) == [1]
