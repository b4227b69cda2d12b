"""The pool's own promises: a failure names its rank, a hang ends, nothing stays behind."""

from __future__ import annotations

import os
import signal
import time

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.parallel.pool import Pool, RankError


def add_up(value: float) -> float:
    total = torch.tensor(value * (dist.get_rank() + 1))
    dist.all_reduce(total)
    return float(total)


def fail_on_rank_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("nothing here")
    dist.barrier()


def hang_on_rank_one() -> None:
    if dist.get_rank() == 1:
        signal.pause()
    dist.barrier()


def die_on_rank_one() -> None:
    if dist.get_rank() == 1:
        os._exit(7)
    dist.barrier()


def test_worlds_of_different_sizes_follow_each_other(pool: Pool) -> None:
    assert [pool.run(n, add_up, value=0.5)[0] for n in (2, 1, 4, 3)] == [1.5, 0.5, 5.0, 3.0]


def test_failures_are_raised_with_rank_and_cause_and_the_pool_recovers() -> None:
    pool = Pool()
    with pytest.raises(RankError, match=r"(?s)rank 1 of 2: .*fail_on_rank_one.*nothing here"):
        pool.run(2, fail_on_rank_one)
    with pytest.raises(RankError, match=r"no answer in time from ranks \[0, 1\]|rank 0 of 2"):
        pool.run(2, hang_on_rank_one, timeout=4.0)
    with pytest.raises(RankError, match="rank 1 of 2: the process died"):
        pool.run(2, die_on_rank_one)
    processes = pool.run(2, os.getpid)
    pool.close()
    deadline = time.monotonic() + 20.0
    while any(map(psutil.pid_exists, processes)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(psutil.pid_exists, processes))
