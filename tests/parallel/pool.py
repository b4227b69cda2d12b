"""Real gloo processes that run test functions on many layouts, one after another.

The workers are forked from a server process that has imported Megatron-Core once. They live until
the test session ends. Each task is a new torch.distributed world, of the first workers of the pool.
The ranks meet at a store in the pytest process, on a port that the system chooses.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import gc
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch.distributed as dist

from gspo_megatron.config import Config

TASK_TIMEOUT = 120.0  # seconds; a task takes 1 to 5 on an idle machine
# torch.distributed leaves some threads of each old world running. A few hundred of them slow down
# every collective. A new worker takes only 0.1 s.
TASKS_OF_A_WORKER = 8
_GRACE = 1.0  # seconds in which the other ranks may report after one rank has failed
_PRELOAD = [
    "__main__",
    "gspo_megatron.verify.parity",
    "gspo_megatron.rollout.megatron.engine",
    # Otherwise an optimizer on rehearsed devices would import this module on every rank, which
    # takes a second.
    "torch._dynamo",
]


class RankError(AssertionError):
    """A task failed on a rank. The message has the rank and its traceback."""


def _take_none(rank: int) -> str:
    return "gloo"


class Pool:
    """The workers, which start when a task first needs them."""

    def __init__(self, take_device: Callable[[int], str] = _take_none) -> None:
        """take_device(rank) gives this process the device of the rank. It returns the backend for
        collectives between such devices."""
        self._take_device = take_device
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_PRELOAD)
        self._workers: list[tuple[ForkServerProcess, Connection]] = []
        self._stacks = tempfile.TemporaryDirectory(prefix="ranks-")
        self._tasks = 0
        self._store: dist.TCPStore | None = None

    def on(self, config: Config, function: Callable[..., Any], **arguments: Any) -> Any:
        """Run `function(config=config, **arguments)` on the ranks of the configuration's layout.
        Returns the result of rank 0."""
        return self.each(config, function, **arguments)[0]

    def each(self, config: Config, function: Callable[..., Any], **arguments: Any) -> list[Any]:
        """Like `on`, but returns the results of all ranks."""
        return self.run(config.world_size_hint(), function, config=config, **arguments)

    def run(
        self,
        world_size: int,
        function: Callable[..., Any],
        *,
        timeout: float = TASK_TIMEOUT,
        **arguments: Any,
    ) -> list[Any]:
        """Run `function(**arguments)` on ranks 0 to world_size - 1. Returns the results of all
        ranks.

        `function` must be in a module that can be imported. The default process group exists when
        `function` begins. A function that needs another world starts and stops torch.distributed
        itself. If a rank fails, the call raises RankError with the traceback of the first rank that
        failed. If ranks run out of time, the call raises RankError with their numbers. In both
        cases all workers are ended, and the next task gets new workers.
        """
        try:
            connections = self._start(world_size)
            self._tasks += 1
            assert self._store is not None
            for rank, connection in enumerate(connections):
                task = (rank, world_size, self._store.port, self._tasks, timeout)
                connection.send((task, function, arguments))
            results = self._results(connections, time.monotonic() + timeout)
            if self._tasks % TASKS_OF_A_WORKER == 0:
                self.close()
            return results
        except BaseException:  # even after an interrupt, no rank may wait for another rank
            self.close()
            raise

    def close(self) -> None:
        """End all workers. The call does nothing if no worker runs."""
        for process, connection in self._workers:
            process.kill()
            connection.close()
        for process, _ in self._workers:
            process.join()
        self._workers, self._store = [], None

    def _start(self, count: int) -> list[Connection]:
        if self._store is None:
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        while len(self._workers) < count:
            ours, theirs = self._context.Pipe()
            stack_file = self._stack_file(len(self._workers))
            arguments = (theirs, stack_file, self._take_device)
            process = self._context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))
        return [connection for _, connection in self._workers[:count]]

    def _results(self, connections: list[Connection], deadline: float) -> list[Any]:
        results: dict[int, Any] = {}
        failures: list[str] = []
        waiting = dict(zip(connections, range(len(connections))))
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    succeeded, value = connection.recv()
                except EOFError:
                    succeeded, value = False, "the process died"
                if succeeded:
                    results[rank] = value
                else:
                    failures.append(f"rank {rank} of {len(connections)}: {value}")
                    deadline = min(deadline, time.monotonic() + _GRACE)
        if failures:
            # The first failure is the cause. Most further failures come from ranks that lost their
            # peer.
            raise RankError("\n".join([failures[0], *(f.splitlines()[-1] for f in failures[1:])]))
        if waiting:
            raise RankError(
                f"no answer in time from ranks {sorted(waiting.values())}\n"
                + "\n".join(self._stack(rank) for rank in sorted(waiting.values()))
            )
        return [results[rank] for rank in range(len(connections))]

    def _stack_file(self, rank: int) -> Path:
        return Path(self._stacks.name) / f"{rank}.txt"

    def _stack(self, rank: int) -> str:
        """The call stack of a rank, innermost call first."""
        process = self._workers[rank][0]
        assert process.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGUSR1)
        deadline = time.monotonic() + _GRACE
        path = self._stack_file(rank)
        while not path.stat().st_size and time.monotonic() < deadline:
            time.sleep(0.05)
        lines = path.read_text().partition("Current thread")[2].splitlines()[1:13]
        return "\n".join([f"rank {rank}:", *lines])


def _serve(connection: Connection, stack_file: Path, take_device: Callable[[int], str]) -> None:
    """The main loop of a worker."""
    # The imported modules stay, so the garbage collections after the tasks need not visit their
    # objects.
    gc.freeze()
    faulthandler.register(signal.SIGUSR1, stack_file.open("w"))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the pytest process handles an interrupt
    threading.Thread(target=_die_with_parent, daemon=True).start()
    while True:
        try:
            task, function, arguments = connection.recv()
        except EOFError:
            return
        try:
            with _world(take_device, *task):
                answer = (True, function(**arguments))
        except BaseException:  # noqa: BLE001 (whatever it is, the test has to hear of it)
            answer = (False, traceback.format_exc())
        connection.send(answer)


def _die_with_parent() -> None:
    """End this process when pytest ends. Otherwise a rank that waits in a collective would live on
    for minutes."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


@contextlib.contextmanager
def _world(
    take_device: Callable[[int], str],
    rank: int,
    world_size: int,
    port: int,
    task: int,
    timeout: float,
) -> Any:
    from gspo_megatron.platform.groups import stop_processes

    limit = datetime.timedelta(seconds=timeout)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
    dist.init_process_group(
        take_device(rank),
        store=dist.PrefixStore(f"task-{task}", store),
        rank=rank,
        world_size=world_size,
        timeout=limit,
    )
    # Without this, a task that has no collective could end while another rank still connects.
    dist.barrier()
    yield
    stop_processes()
