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
from gspo_megatron.rollout.vllm.process import END_SECONDS, errors_of, last_lines_of

FOLDER = "servers"  # in the bank's folder
BEAT_SECONDS = 2.0
SILENT_SECONDS = 30.0  # without a sign of life
_LOOK_SECONDS = 0.5


def wanted_file(folder: Path, node: str) -> Path:
    """What the service wants of a node; it holds the token of the servers."""
    return folder / f"{node}.wanted.json"


def report_file(folder: Path, node: str) -> Path:
    """What the node's agent says."""
    return folder / f"{node}.json"


def write_letter(path: Path, servers: Mapping[str, Any], address: str | None = None) -> None:
    """Write a side's file, which only the user may read. address: of the service. Raises
    DataError."""
    content = {"beat": time.time(), "servers": servers, "address": address}
    write_atomically(path, json.dumps(content).encode(), mode=0o600)


class Letters:
    """A side's file, as the other side reads it again and again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.servers: dict[str, Any] = {}  # of the newest; by number
        self.heard: float | None = None  # when it last changed; None: never while we looked
        self.address: str | None = None  # of the side that writes it; an agent has none
        self._beat: float | None = None

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
        self._written = -math.inf  # when; what has changed since is due at once
        self._lock = threading.Lock()
        self.report = Letters(report_file(folder, name))
        for path in (self.report.path, wanted_file(folder, name)):  # of an earlier start
            path.unlink(missing_ok=True)

    def want(self, number: str, server: dict[str, Any]) -> None:
        """Have this server, in the place of any other of its number."""
        with self._lock:
            self._wanted[number] = server
            self._written = -math.inf

    def drop(self, number: str, boot: str) -> None:
        """Have this server no longer."""
        with self._lock:
            if self._wanted.get(number, {}).get("boot") == boot:
                del self._wanted[number]
                self._written = -math.inf

    def exchange(self) -> None:
        """Read and write. Raises DataError."""
        self.report.read()
        with self._lock:
            if time.monotonic() - self._written > BEAT_SECONDS:
                write_letter(wanted_file(self.folder, self.name), self._wanted, self.address)
                self._written = time.monotonic()


class Nodes:
    """All nodes with agents."""

    def __init__(self, folder: Path, names: Sequence[str], address: str | None = None) -> None:
        self.nodes = [Node(folder, name, address) for name in names]

    async def run(self) -> None:
        """Exchange letters with all agents, until it is cancelled."""
        try:
            while True:
                await asyncio.gather(*(self._exchange(node) for node in self.nodes))
                await asyncio.sleep(_LOOK_SECONDS)
        finally:
            for node in self.nodes:
                wanted_file(node.folder, node.name).unlink(missing_ok=True)

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

    def last_lines(self) -> str:
        """Of its log, for a message."""
        if self.node.report.heard is None:
            return self._no_agent()
        return last_lines_of(self.log)

    def errors(self) -> str:
        """The last ones in its log, to be added to a message."""
        heard = self.node.report.heard is not None
        return f"; {errors_of(self.log) if heard else self._no_agent()}"

    def _no_agent(self) -> str:
        return f"no agent answers from {self.node.name} (gspo-megatron serve --join)"

    def _told(self, key: str) -> Any:
        """What the agent last said of this start of the server."""
        entry = self.node.report.servers.get(self.number, {})
        return entry.get(key) if entry.get("boot") == self.boot else None


def server_log(folder: Path, number: int | str) -> Path:
    """Of a server's output, on all nodes."""
    return folder / f"{number}.log"
