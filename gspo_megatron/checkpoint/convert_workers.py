"""Runs a conversion in several processes, and in several threads of each process."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, as_completed, wait
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from gspo_megatron.errors import DataError
from gspo_megatron.observe.progress import Progress
from gspo_megatron.process.cores import usable_cores

_MILLION = 1_000_000
_QUEUED = 2  # for each thread: limit of the items that are submitted and not finished
_MOST_THREADS = 4  # each thread holds a few blocks of tensors in memory

Item = TypeVar("Item")
Done = Callable[[int], None]  # called with the number of finished bytes or weights


@dataclass(frozen=True)
class WorkerShard:
    """One of the processes that convert one checkpoint. `gather` is a collective and returns the
    values of all processes."""

    rank: int = 0
    world_size: int = 1
    gather: Callable[[Any], list[Any]] = lambda value: [value]

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @contextlib.contextmanager
    def barrier(self) -> Generator[None]:
        """Raise an error in all processes if one of them raises DataError or OSError inside the
        context. Leaving the context is a collective."""
        problem = None
        try:
            yield
        except (DataError, OSError) as error:
            problem = error
        messages = self.gather(None if problem is None else str(problem))
        if problem is not None:
            raise problem
        if any(messages):
            raise DataError("\n".join(filter(None, messages)))


ALONE = WorkerShard()


@contextlib.contextmanager
def shard_of_rank() -> Generator[WorkerShard]:
    """Join the other ranks of torchrun (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), and yield this
    rank's shard."""
    import torch.distributed as dist

    from gspo_megatron.platform.rendezvous import join_store

    world_size = int(os.environ["WORLD_SIZE"])
    if world_size == 1:
        yield ALONE
        return

    def gather(value: Any) -> list[Any]:
        values = [None] * world_size
        dist.all_gather_object(values, value)
        return values

    patience = dist.default_pg_timeout
    rank, store = int(os.environ["RANK"]), join_store(patience)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=patience)
    try:
        yield WorkerShard(dist.get_rank(), world_size, gather)
    finally:
        dist.destroy_process_group()


def thread_count() -> int:
    """Return the number of threads that a converting process uses."""
    return min(_MOST_THREADS, usable_cores())


def in_threads(
    work: Callable[[Item, Done], None],
    items: Iterable[Item],
    title: str,
    unit: str,
    total: int,
    *,
    enabled: bool = True,
) -> None:
    """Call work(item, done) for all items, a few at a time. `done` moves a progress bar up to
    `total`. The bar counts millions, and `unit` is the word for a million. The iterator `items` may
    raise. After the first error, or Ctrl-C, `done` raises in all threads to end them."""
    lock, stopped = threading.Lock(), threading.Event()
    count, size, threads = 0, max(1, total // _MILLION), thread_count()

    def done(more: int) -> None:
        nonlocal count
        if stopped.is_set():
            raise InterruptedError
        with lock:
            count += more
            bar.update(size if count >= total else min(size - 1, count // _MILLION), {})

    torch.set_num_threads(1)  # The threads of the pool use all cores.
    progress = Progress(size, title, enabled=enabled, unit=unit)
    with progress as bar, ThreadPoolExecutor(threads) as pool:
        try:
            running: set[Future[None]] = set()
            for item in items:
                running.add(pool.submit(work, item, done))
                if len(running) >= _QUEUED * threads:
                    finished, running = wait(running, return_when=FIRST_COMPLETED)
                    for future in finished:
                        future.result()
            for future in as_completed(running):
                future.result()
        except BaseException:
            stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
