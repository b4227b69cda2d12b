"""Runs servers on other nodes: the service lists them in a file, and an agent on each node starts
them.

    RUN/rollouts/servers/NODE.wanted.json    service -> agent: the servers that should run there
    RUN/rollouts/servers/NODE.json           agent -> service: running servers, and how servers
    ended

The nodes of a job share the run folder, and find each other only by these files. Each side rewrites
its file every two seconds, as a heartbeat. The clocks of nodes differ, so a reader notes by its own
clock when a file last changed. The service makes all decisions; an agent (`agent.py`) only starts
and ends the listed servers.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import secrets
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gspo_megatron.errors import DataError
from gspo_megatron.files import WRONG_VALUES, parse_json, write_atomically
from gspo_megatron.rollout.vllm.process import END_SECONDS, errors_of

FOLDER = "servers"  # in the folder of the store
BEAT_SECONDS = 2.0
SILENT_SECONDS = 30.0  # a node without a heartbeat for this time counts as lost
_LOOK_SECONDS = 0.5


def wanted_file(folder: Path, node: str) -> Path:
    """Return the path of the service's file, which lists the servers that a node should run, with
    their access tokens."""
    return folder / f"{node}.wanted.json"


def report_file(folder: Path, node: str) -> Path:
    """Return the path of the agent's file, which lists the servers that the node runs."""
    return folder / f"{node}.json"


class HeartbeatFile:
    """A file that one side writes regularly and the other side reads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.servers: dict[str, Any] = {}  # as read last: server number -> its data
        # when a reader saw the file change last; None: no change seen yet
        self.heard: float | None = None
        self.address: str | None = None  # the writer's address; None for an agent
        self.is_foreign = False  # as read last: not written by this object
        self._writer = secrets.token_hex(8)
        self._beat: float | None = None
        self._written, self._written_at = {}, -math.inf

    def write(self, servers: Mapping[str, Any], address: str | None = None) -> None:
        """Write the file if the content has changed or a heartbeat is due.

        The file can be read only by the user who runs this process. address: the service's address.
        Raises DataError.
        """
        content = {"servers": dict(servers), "address": address}
        if content != self._written or time.monotonic() - self._written_at > BEAT_SECONDS:
            text = json.dumps({"beat": time.time(), "writer": self._writer, **content})
            write_atomically(self.path, text.encode(), mode=0o600)
            self._written, self._written_at = content, time.monotonic()

    def read(self) -> None:
        try:
            content = parse_json(self.path.read_bytes())
            beat, servers = content["beat"], dict(content["servers"])
            address, is_foreign = content.get("address"), content.get("writer") != self._writer
        except FileNotFoundError:
            self.servers, self.is_foreign = {}, False
            return
        # NFS may show a damaged file while the file is being replaced. It is read again later.
        except (OSError, *WRONG_VALUES):
            return
        if self._beat not in (None, beat):
            self.heard = time.monotonic()
        self._beat, self.servers, self.address = beat, servers, address
        self.is_foreign = is_foreign


class Node:
    """The service's view of a node with an agent."""

    def __init__(self, folder: Path, name: str, address: str | None = None) -> None:
        """address: the service's address. The node's servers listen on the network interface
        towards it."""
        self.name, self.folder, self.address = name, folder, address
        self.servers: dict[str, dict[str, Any]] = {}  # that should run there, by number
        self.wanted = HeartbeatFile(wanted_file(folder, name))
        self.report = HeartbeatFile(report_file(folder, name))
        for file in (self.report, self.wanted):  # an earlier start may have left these files
            file.path.unlink(missing_ok=True)

    def exchange(self) -> None:
        """Read the agent's file and write the service's. Raises DataError."""
        self.report.read()
        # No lock: `write` copies `servers` in one step. One coroutine starts and kills a server, so
        # both never happen to the same entry at the same time.
        self.wanted.write(self.servers, self.address)


async def exchange_files(nodes: Sequence[Node]) -> None:
    """Exchange files with the agents of all nodes until cancelled."""
    # Threads of their own: those of asyncio.to_thread may all be busy with an environment's tools.
    threads = ThreadPoolExecutor(max(1, len(nodes)), "exchange")
    loop = asyncio.get_running_loop()

    async def exchange(node: Node) -> None:
        # If the disk is full, the agents get no heartbeat and end their servers. The store reports
        # the full disk.
        with contextlib.suppress(DataError, OSError):
            await loop.run_in_executor(threads, node.exchange)

    try:
        while True:
            await asyncio.gather(*map(exchange, nodes))
            await asyncio.sleep(_LOOK_SECONDS)
    finally:
        threads.shutdown(wait=False)
        for node in nodes:
            node.wanted.path.unlink(missing_ok=True)


class RemoteProcess:
    """A server on another node, with the interface of ServerProcess."""

    def __init__(
        self,
        node: Node,
        number: int,
        words: Sequence[str],
        environ: Mapping[str, str],
        gpus: Sequence[int],
    ) -> None:
        """number: the server's number in the run; words, environ: see ServerProcess; gpus: numbers
        of the node's GPUs, from 0."""
        self.node, self.number = node, str(number)
        self.boot = secrets.token_hex(8)  # identifies this start of the server
        self.log = server_log(node.folder, number)
        self._since = time.monotonic()
        server = {"boot": self.boot, "words": list(words), "environ": dict(environ)}
        node.servers[self.number] = {**server, "gpus": list(gpus)}

    @property
    def url(self) -> str:
        """The server's URL; empty until the agent has started the server."""
        return self._reported("url") or ""

    def has_ended(self) -> str | None:
        """Return in words how the server ended; None while it runs or has not started yet."""
        heard = self.node.report.heard
        # Before the first heartbeat, the server's deadline limits the wait for the agent.
        if heard is not None:
            silent = time.monotonic() - max(heard, self._since)
            if silent > SILENT_SECONDS:
                return f"there is no sign of life from {self.node.name} for {silent:.0f} s"
        return self._reported("ended")

    async def end(self) -> None:
        """Make the agent end the server; returns when it has ended, or after a time limit."""
        self.kill()
        deadline = time.monotonic() + END_SECONDS + 3 * BEAT_SECONDS
        while time.monotonic() < deadline and self.node.report.heard is not None:
            entry = self.node.report.servers.get(self.number)
            if entry is None or entry["boot"] != self.boot or entry["ended"]:
                return
            await asyncio.sleep(0.1)

    def kill(self) -> None:
        """Tell the agent to end the server, without waiting.

        The agent starts another server with this number only after this one has ended.
        """
        if self.node.servers.get(self.number, {}).get("boot") == self.boot:
            self.node.servers.pop(self.number, None)

    def errors(self) -> str:
        """Return the last errors in the server's log, as text to append to a message."""
        if self.node.report.heard is None:
            return f"; no agent answers from {self.node.name} (gspo-megatron serve --join)"
        return f"; {errors_of(self.log)}"

    def _reported(self, key: str) -> Any:
        """Return a value that the agent last reported for this start of the server."""
        entry = self.node.report.servers.get(self.number, {})
        return entry.get(key) if entry.get("boot") == self.boot else None


def server_log(folder: Path, number: int | str) -> Path:
    """Return the path of the log of a server's output, the same on all nodes."""
    return folder / f"{number}.log"
