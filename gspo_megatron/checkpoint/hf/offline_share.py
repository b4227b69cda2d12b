"""Several processes, and several threads of each, that convert one checkpoint together."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from gspo_megatron.errors import DataError

_MOST_THREADS = 4  # each has a few buffers, and a disk serves no more of them well

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Share:
    """One of several processes that convert together; `barrier` returns when all have called it,
    and `broadcast` then, with what the main process passed."""

    rank: int = 0
    world_size: int = 1
    barrier: Callable[[], object] = lambda: None
    broadcast: Callable[[Any], Any] = lambda value: value

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def of_main(self, choose: Callable[[], Result]) -> Result:
        """What `choose` returns in the main process, in all. They raise DataError together, where
        it raises that or an OSError: the others wait here, and would never hear of another."""
        if self.world_size == 1:
            return choose()
        chosen: Any = None
        problem: Exception | None = None
        if self.is_main:
            try:
                chosen = choose()
            except (DataError, OSError) as error:
                problem = error
        chosen, told = self.broadcast((chosen, None if problem is None else str(problem)))
        if problem is not None:
            raise problem
        if told is not None:
            raise DataError(told)
        return chosen


ALONE = Share()


@contextmanager
def shared_by_ranks() -> Iterator[Share]:
    """The share of a rank that torchrun's variables describe (RANK, WORLD_SIZE, MASTER_ADDR,
    MASTER_PORT); alone where there is but one."""
    import torch.distributed as dist

    if int(os.environ["WORLD_SIZE"]) == 1:
        yield ALONE
        return

    def broadcast(value: Any) -> Any:
        told = [value]
        dist.broadcast_object_list(told, src=0)
        return told[0]

    dist.init_process_group("gloo")
    try:
        yield Share(dist.get_rank(), dist.get_world_size(), dist.barrier, broadcast)
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
