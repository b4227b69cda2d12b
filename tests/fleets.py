"""A fleet of servers with a scheduler, for tests of the rollout service."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from gspo_megatron.rollout.vllm.fleet import Fleet
from gspo_megatron.rollout.vllm.scheduler import Scheduler
from gspo_megatron.rollout.vllm.server import FleetSettings, Server
from gspo_megatron.rollout.vllm.weights import Weights
from gspo_megatron.rollout.vllm.worker.gspo_vllm_answers import Response


class ScheduledFleet(Fleet):
    """A fleet with a scheduler. `async with` closes it at the end."""

    def __init__(self, servers: Sequence[Server], settings: FleetSettings) -> None:
        super().__init__(servers, settings)
        self.scheduler = Scheduler(self)

    async def __aenter__(self) -> ScheduledFleet:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def change_settings(self, **changes: Any) -> None:
        self.settings = self.loader.settings = replace(self.settings, **changes)

    async def update(self, weights: Weights) -> None:
        """Give these weights to all servers."""
        self.take_weights(weights)
        await self.update_servers()

    async def generate(
        self, prompt: Sequence[int], sampling: Mapping[str, Any], version: int, draw: str = ""
    ) -> Response:
        """Generate one response. `sampling` contains the seed."""
        [response] = await self.scheduler.generate_all(prompt, sampling, [None], version, draw)
        return response
