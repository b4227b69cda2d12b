"""Operations of reductions that shared memory does not do are left to gloo, whose results are the
numbers that were computed by hand."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from gspo_megatron.platform.cpu import host_collectives
from tests.parallel.pool import Pool

# [ranks, elements]: what each rank gives
GIVEN = [[1.0, 5.0, 2.0, 4.0], [3.0, 2.0, 2.0, 1.0]]
RESULTS = {
    "SUM": [4.0, 7.0, 4.0, 5.0],
    "MAX": [3.0, 5.0, 2.0, 4.0],
    "MIN": [1.0, 2.0, 2.0, 1.0],
    "PRODUCT": [3.0, 10.0, 4.0, 4.0],
}


def reduced(operation: str) -> tuple[list[float], list[float]]:
    """By all_reduce, and this rank's share by reduce_scatter."""
    op, given = getattr(dist.ReduceOp, operation), torch.tensor(GIVEN[dist.get_rank()])
    whole, share = given.clone(), torch.empty(2)
    dist.all_reduce(whole, op)
    dist.reduce_scatter_tensor(share, given.clone(), op=op)
    return whole.tolist(), share.tolist()


@pytest.mark.parametrize("operation", list(RESULTS))
def test_each_operation_gives_what_it_says(pool: Pool, operation: str) -> None:
    wanted = RESULTS[operation]
    first, second = pool.run(2, reduced, operation=operation)
    assert first == (wanted, wanted[:2]) and second == (wanted, wanted[2:])


@pytest.mark.parametrize("operation", ["MAX", "MIN", "PRODUCT"])
def test_sums_are_not_given_for_another_operation(operation: str) -> None:
    group: dist.ProcessGroup = None  # type: ignore[assignment]  # it gets no further
    op = getattr(dist.ReduceOp, operation)
    with pytest.raises(AssertionError, match="reduce_scatter by"):
        host_collectives.reduce_scatter_tensor(group, torch.empty(2), torch.ones(4), op)
