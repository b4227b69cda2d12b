"""The promises of the pool: a failure names its rank, a hang ends, and no process stays behind."""

from __future__ import annotations

import os
import signal

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.parallel.pool import Pool, RankError
from tests.programs import wait_until


def add_up(value: float) -> float:
    total = torch.tensor(value * (dist.get_rank() + 1))
    dist.all_reduce(total)
    return float(total)


def end_rank_one(how: str) -> None:
    if dist.get_rank() == 1:
        if how == "dies":
            os._exit(7)
        if how == "hangs":
            signal.pause()
        raise ValueError("nothing here")
    dist.barrier()


def test_worlds_of_different_sizes_follow_each_other(pool: Pool) -> None:
    assert [pool.run(n, add_up, value=0.5)[0] for n in (2, 1, 4, 3)] == [1.5, 0.5, 5.0, 3.0]


def test_failures_are_raised_with_rank_and_cause_and_the_pool_recovers() -> None:
    pool = Pool()
    with pytest.raises(RankError, match=r"(?s)rank 1 of 2: .*end_rank_one.*nothing here"):
        pool.run(2, end_rank_one, how="fails")
    with pytest.raises(RankError, match=r"no answer in time from ranks \[0, 1\]|rank 0 of 2"):
        pool.run(2, end_rank_one, how="hangs", timeout=4.0)
    with pytest.raises(RankError, match="rank 1 of 2: the process died"):
        pool.run(2, end_rank_one, how="dies")
    processes = pool.run(2, os.getpid)
    pool.close()
    wait_until(lambda: not any(map(psutil.pid_exists, processes)), seconds=20)
