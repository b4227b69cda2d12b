"""The agent of a node (see `remote.py`): starts and ends servers for the rollout service."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo_megatron.addresses import route_to
from gspo_megatron.errors import DataError, RolloutError, tell
from gspo_megatron.process.nodes import visible_gpus
from gspo_megatron.rollout.vllm.process import ServerProcess
from gspo_megatron.rollout.vllm.remote import HeartbeatFile, report_file, server_log, wanted_file

_LOOK_SECONDS = 0.5
# Without a heartbeat of the service for this time, the agent ends the servers. This time is longer
# than SILENT_SECONDS, so that servers survive a short pause of the service.
FORGOTTEN_SECONDS = 60.0


@dataclass
class _Started:
    """A server that was started or failed to start."""

    boot: str
    process: ServerProcess | None = None
    ended: str | None = None  # how the server ended, in words

    def as_json(self) -> dict[str, Any]:
        """Return the server's state as JSON values, for the service."""
        if self.process is None:
            return {"boot": self.boot, "url": None, "ended": self.ended}
        self.ended = self.ended or self.process.has_ended()
        return {"boot": self.boot, "url": self.process.url, "ended": self.ended}


class NodeAgent:
    """Runs the servers of a run on this node."""

    def __init__(
        self, folder: Path, name: str, host: str | None = None, python: str | None = None
    ) -> None:
        """folder: folder of the nodes' files, which may not exist yet; name: this node's name in
        the run; host: the address that servers listen on; None: this node's address on the route to
        the service; python: replaces the interpreter that the run names."""
        self.folder, self.name, self.host, self.python = folder, name, host, python
        self.wanted = HeartbeatFile(wanted_file(folder, name))
        self.report = HeartbeatFile(report_file(folder, name))
        self.servers: dict[str, _Started] = {}

    async def run(self, ended: asyncio.Event) -> None:
        """Run servers until `ended` is set, then end them all."""
        try:
            while not ended.is_set():
                self.wanted.read()
                await self._end_others()
                self._start_missing()
                self._write_report()
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(ended.wait(), _LOOK_SECONDS)
        finally:
            self.wanted.servers = {}
            await self._end_others()
            self._write_report()

    def _is_forgotten(self) -> bool:
        """Return whether no heartbeat of a service came for FORGOTTEN_SECONDS."""
        heard = self.wanted.heard
        return heard is None or time.monotonic() - heard > FORGOTTEN_SECONDS

    async def _end_others(self) -> None:
        """End the servers that the service does not list."""
        wanted = {} if self._is_forgotten() else self.wanted.servers
        others = {
            number: started
            for number, started in self.servers.items()
            if wanted.get(number, {}).get("boot") != started.boot
        }
        running = [each.process for each in others.values() if each.process is not None]
        await asyncio.gather(*(process.end() for process in running))
        for number in others:
            self._print(f"server {number} ended")
            del self.servers[number]

    def _start_missing(self) -> None:
        if self._is_forgotten():
            return
        for number, server in self.wanted.servers.items():
            if number not in self.servers:
                started = self.servers[number] = _Started(server["boot"])
                try:
                    started.process = self._start(number, server)
                    self._print(f"server {number} started at {started.process.url}")
                except RolloutError as problem:
                    started.ended = str(problem)
                    self._print(f"server {number}: {problem}")

    def _start(self, number: str, server: Mapping[str, Any]) -> ServerProcess:
        python, *words = server["words"]
        environ = {**server["environ"], **_devices(server["gpus"])}
        log, host = server_log(self.folder, number), self.host or self._way_to_service()
        return ServerProcess([self.python or python, *words], environ, log, host)

    def _way_to_service(self) -> str:
        """Return this node's address on the route to the service. Raises RolloutError.

        The address of the host's own name is not used, because only this host may be able to reach
        it.
        """
        service = self.wanted.address or "an unknown address"
        if (address := route_to(service)) is None:
            raise RolloutError(
                f"{self.name} has no route to the run's service at {service}; give --host, an "
                "address of this node that the run's first node can reach"
            )
        return address

    def _write_report(self) -> None:
        """Write the report, if the folder exists. Only the run makes this folder, because a new run
        needs an empty run folder."""
        if self.folder.is_dir():
            servers = {number: started.as_json() for number, started in self.servers.items()}
            # If the disk is full, the service gets no heartbeat, and counts this node as lost.
            with contextlib.suppress(DataError):
                self.report.write(servers)

    def _print(self, text: str) -> None:
        tell(f"{self.name}: {text}", sys.stdout)


def _devices(gpus: list[int]) -> dict[str, str]:
    """Return the variable that selects GPUs of this node. Raises RolloutError if the node has too
    few GPUs."""
    if not gpus:
        return {}
    numbers = visible_gpus()
    if numbers is None:
        numbers = list(map(str, range(gpus[-1] + 1)))
    if len(numbers) <= gpus[-1]:
        raise RolloutError(
            f"needs GPU {gpus[-1]} of its node, counted from 0, but the node has {len(numbers)} "
            f"(CUDA_VISIBLE_DEVICES = {os.environ['CUDA_VISIBLE_DEVICES']})"
        )
    return {"CUDA_VISIBLE_DEVICES": ",".join(numbers[each] for each in gpus)}
