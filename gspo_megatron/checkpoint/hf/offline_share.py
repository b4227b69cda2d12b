"""Several processes, and several threads of each, that convert one checkpoint together."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

_MOST_THREADS = 4  # each has a few buffers, and a disk serves no more of them well

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Share:
    """One of several processes that convert together; `barrier` returns when all have called it."""

    rank: int = 0
    world_size: int = 1
    barrier: Callable[[], object] = lambda: None

    @property
    def is_main(self) -> bool:
        return self.rank == 0


ALONE = Share()


@contextmanager
def shared_by_ranks() -> Iterator[Share]:
    """The share of a rank that torchrun's variables describe (RANK, WORLD_SIZE, MASTER_ADDR,
    MASTER_PORT); alone where there is but one."""
    import torch.distributed as dist

    if int(os.environ["WORLD_SIZE"]) == 1:
        yield ALONE
        return
    dist.init_process_group("gloo")
    try:
        yield Share(dist.get_rank(), dist.get_world_size(), dist.barrier)
    finally:
        dist.destroy_process_group()


def thread_count() -> int:
    """As many as this process has cores. Reading, writing and checksums leave Python to others."""
    return max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0))))


def in_threads(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """work(item) of all items, a few at a time, begun in their order. After the first error, or
    Ctrl-C, none is begun any more."""
    results: list[Any] = [None] * len(items)
    numbers = iter(range(len(items)))  # shared: a thread takes the next one
    failed = threading.Event()

    def take_turns() -> None:
        for number in numbers:
            if failed.is_set():
                return
            results[number] = work(items[number])

    with ThreadPoolExecutor(thread_count()) as pool:
        try:
            for future in as_completed([pool.submit(take_turns) for _ in range(thread_count())]):
                future.result()
        except BaseException:
            failed.set()
            raise
    return results
