"""Servers on other nodes: the service says which it wants, and an agent on each node has them.

    RUN/rollouts/servers/NODE.wanted.json    service -> agent: the servers that are to run there
    RUN/rollouts/servers/NODE.json           agent -> service: those that run, and how others ended

The nodes of a job share the run folder, and need nothing else to find each other. Each side writes
its file again every two seconds, as a sign of life. Clocks of nodes differ, so what counts is when
the file last changed by the reader's own clock. All decisions are the service's: an agent only
starts and ends what it is told to. `agent.py` is the other end.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gspo_megatron.errors import DataError
from gspo_megatron.files import WRONG_VALUES, parse_json, write_atomically
from gspo_megatron.rollout.vllm.process import END_SECONDS, errors_of

FOLDER = "servers"  # in the bank's folder
BEAT_SECONDS = 2.0
SILENT_SECONDS = 30.0  # without a sign of life
_LOOK_SECONDS = 0.5


def wanted_file(folder: Path, node: str) -> Path:
    """The file of the service: which servers a node has to run, and their tokens."""
    return folder / f"{node}.wanted.json"


def report_file(folder: Path, node: str) -> Path:
    """The file of the node's agent."""
    return folder / f"{node}.json"


class HeartbeatFile:
    """A side's file. That side writes it again and again, the other side reads it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.servers: dict[str, Any] = {}  # of the newest; by number
        self.heard: float | None = None  # when it last changed; None: never while we looked
        self.address: str | None = None  # of the side that writes it; an agent has none
        self._beat: float | None = None
        self._written, self._written_at = {}, -math.inf

    def write(self, servers: Mapping[str, Any], address: str | None = None) -> None:
        """Write it where something has changed, or a sign of life is due. Only the user may read
        it. address: of the service. Raises DataError."""
        content = {"servers": dict(servers), "address": address}
        if content != self._written or time.monotonic() - self._written_at > BEAT_SECONDS:
            text = json.dumps({"beat": time.time(), **content})
            write_atomically(self.path, text.encode(), mode=0o600)
            self._written, self._written_at = content, time.monotonic()

    def read(self) -> None:
        try:
            found = parse_json(self.path.read_bytes())
            beat, servers, address = found["beat"], dict(found["servers"]), found.get("address")
        except FileNotFoundError:
            self.servers = {}
            return
        except (OSError, *WRONG_VALUES):  # NFS, while it is replaced: the next look will tell
            return
        if self._beat not in (None, beat):
            self.heard = time.monotonic()
        self._beat, self.servers, self.address = beat, servers, address


class Node:
    """A node with an agent, as the service sees it."""

    def __init__(self, folder: Path, name: str, address: str | None = None) -> None:
        """address: of the service; the node's servers listen on the way to it."""
        self.name, self.folder, self.address = name, folder, address
        self._wanted: dict[str, dict[str, Any]] = {}
        self._lock = threading.Lock()
        self.wanted = HeartbeatFile(wanted_file(folder, name))
        self.report = HeartbeatFile(report_file(folder, name))
        for file in (self.report, self.wanted):  # of an earlier start
            file.path.unlink(missing_ok=True)

    def want(self, number: str, server: dict[str, Any]) -> None:
        """Have this server, in the place of any other of its number."""
        with self._lock:
            self._wanted[number] = server

    def drop(self, number: str, boot: str) -> None:
        """Have this server no longer."""
        with self._lock:
            if self._wanted.get(number, {}).get("boot") == boot:
                del self._wanted[number]

    def exchange(self) -> None:
        """Read and write. Raises DataError."""
        self.report.read()
        with self._lock:
            self.wanted.write(self._wanted, self.address)


class Nodes:
    """All nodes with agents."""

    def __init__(self, folder: Path, names: Sequence[str], address: str | None = None) -> None:
        self.nodes = [Node(folder, name, address) for name in names]

    async def run(self) -> None:
        """Exchange files with all agents, until it is cancelled."""
        try:
            while True:
                await asyncio.gather(*(self._exchange(node) for node in self.nodes))
                await asyncio.sleep(_LOOK_SECONDS)
        finally:
            for node in self.nodes:
                node.wanted.path.unlink(missing_ok=True)

    @staticmethod
    async def _exchange(node: Node) -> None:
        # A full disk: the agents hear nothing, and end their servers; the bank says what is wrong.
        with contextlib.suppress(DataError, OSError):
            await asyncio.to_thread(node.exchange)


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
        """number: of the server in the run; words, environ: of its command, as for ServerProcess;
        gpus: which of the node's, counted from 0."""
        self.node, self.number = node, str(number)
        self.boot = secrets.token_hex(8)  # no other start of any server has it
        self.log = server_log(node.folder, number)
        self._since = time.monotonic()
        wanted = {"boot": self.boot, "words": list(words), "environ": dict(environ)}
        node.want(self.number, {**wanted, "gpus": list(gpus)})

    @property
    def url(self) -> str:
        """Empty until the agent has started it."""
        return self._told("url") or ""

    def has_ended(self) -> str | None:
        """How it has ended, in words; None while it runs, or is not there yet."""
        heard = self.node.report.heard
        if heard is not None:  # an agent that comes late has until the server's deadline
            silent = time.monotonic() - max(heard, self._since)
            if silent > SILENT_SECONDS:
                return f"there is no sign of life from {self.node.name} for {silent:.0f} s"
        return self._told("ended")

    async def end(self) -> None:
        """Have the agent end it; returns when that is done, or when it takes too long."""
        self.kill()
        deadline = time.monotonic() + END_SECONDS + 3 * BEAT_SECONDS
        while time.monotonic() < deadline and self.node.report.heard is not None:
            entry = self.node.report.servers.get(self.number)
            if entry is None or entry["boot"] != self.boot or entry["ended"]:
                return
            await asyncio.sleep(0.1)

    def kill(self) -> None:
        """Have the agent end it, whenever it hears of it: it starts no other one before."""
        self.node.drop(self.number, self.boot)

    def errors(self) -> str:
        """The last ones in its log, to be added to a message."""
        if self.node.report.heard is None:
            return f"; no agent answers from {self.node.name} (gspo-megatron serve --join)"
        return f"; {errors_of(self.log)}"

    def _told(self, key: str) -> Any:
        """A value that the agent last told of this start of the server."""
        entry = self.node.report.servers.get(self.number, {})
        return entry.get(key) if entry.get("boot") == self.boot else None


def server_log(folder: Path, number: int | str) -> Path:
    """The log of a server's output, on all nodes."""
    return folder / f"{number}.log"
