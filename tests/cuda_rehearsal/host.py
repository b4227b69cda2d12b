"""A host with rehearsed devices. It is a process with a pool of ranks, each with its own device.

The host is a separate program, because the device must exist before torch is imported, and pytest
has already imported torch.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from tests.parallel.pool import TASK_TIMEOUT, Pool, RankError
from tests.programs import ROOT, command_environment

DEVICES = 8


class Host:
    """Runs functions on ranks, like Pool. The process starts when it is first needed."""

    def __init__(self, engine: str | None = None) -> None:
        """engine: see `rehearsal`."""
        self._engine = engine
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def run(
        self,
        world_size: int,
        function: Callable[..., Any],
        *,
        timeout: float = TASK_TIMEOUT,
        **arguments: Any,
    ) -> list[Any]:
        """Run a function on ranks, like Pool.run. Here, too, RankError names the rank that failed
        and its error."""
        connection = self._start()
        # Plain pickle sends tensors by value. Other pickles send handles, which are valid only
        # within one tree of processes.
        connection.send_bytes(pickle.dumps((world_size, function, timeout, arguments)))
        succeeded, value = pickle.loads(connection.recv_bytes())
        if not succeeded:
            raise RankError(value)
        return value

    def on(self, config: Any, function: Callable[..., Any], **arguments: Any) -> Any:
        """Run a function on the ranks of a configuration, like Pool.on."""
        return self.run(config.world_size_hint(), function, config=config, **arguments)[0]

    def close(self) -> None:
        """End all processes."""
        if self._process is None or self._connection is None:
            return
        self._connection.close()
        self._process.wait(timeout=60)
        self._process = self._connection = None

    def _start(self) -> Connection:
        if self._connection is None:
            from multiprocessing import Pipe

            from tests.cuda_rehearsal.environment import rehearsal

            # this may build the device
            variables = command_environment() | rehearsal(DEVICES, self._engine)
            self._connection, theirs = Pipe()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.cuda_rehearsal.host", str(theirs.fileno())],
                env=variables,
                cwd=ROOT,
                pass_fds=[theirs.fileno()],
            )
            theirs.close()
        return self._connection


def take_device(rank: int) -> str:
    """Let this process use the device with the number of its rank, and no other device."""
    import torch

    from tests.cuda_rehearsal import runtime

    assert torch.cuda.is_available(), "the device is not there"
    os.environ["LOCAL_RANK"] = str(rank)
    runtime.begin(DEVICES, rank)
    torch.cuda.set_device(rank)
    return "nccl"


def main(descriptor: int) -> None:
    """Serve requests until the other end of the connection is closed."""
    from tests.cuda_rehearsal import host  # the ranks find the function under this name

    connection, pool = Connection(descriptor), Pool(host.take_device)
    while True:
        try:
            world_size, function, timeout, arguments = pickle.loads(connection.recv_bytes())
        except EOFError:
            pool.close()
            return
        try:
            answer = (True, pool.run(world_size, function, timeout=timeout, **arguments))
        except RankError as error:
            answer = (False, str(error))
        connection.send_bytes(pickle.dumps(answer))


if __name__ == "__main__":
    main(int(sys.argv[1]))
