"""Loads new adapters on the servers (rollout.vllm.lora: adapter).

A server starts with the base model, and keeps it. Each version of the adapters has its own name. A
request gives the name of the version that it needs. So responses in progress continue with the
adapter that they began with, and the server's prefix cache never mixes versions. `WeightLoader`
checks with fixed prompts that a server computes with the new version. `AdapterLoader` also checks
that the server's layers use all parts of the adapter.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

from gspo_megatron.rollout.vllm.client import ServerGone, ServerRefused
from gspo_megatron.rollout.vllm.server import Server
from gspo_megatron.rollout.vllm.weights import CALL_SECONDS, WeightLoader, Weights

_SHOWN = 6
# A server must have at least this share of the sum of squares in the adapter's file. The share is
# below 1, because vLLM rounds adapters to the type in which it computes.
_LEAST = 0.98


class AdapterLoader(WeightLoader):
    """Loads the newest adapters on single servers. `Weights.folder` is a PEFT folder."""

    starts_with_weights = False

    async def first_weights(self, server: Server, started_with: Weights, deadline: float) -> None:
        server.adapters.clear()  # the server has just started and holds no adapter
        await super().first_weights(server, started_with, deadline)

    async def renew(self, server: Server, weights: Weights) -> bool:
        is_renewed = await super().renew(server, weights)
        await self.release(server)
        return is_renewed

    async def _load(
        self,
        server: Server,
        weights: Weights,
        deadline: float,
        stream: Mapping[str, Any] | None = None,
    ) -> None:
        assert stream is None and weights.folder is not None, "adapters come in folders"
        server.version, start = None, time.monotonic()
        loading = server.client.load_adapter(
            self._name(weights.version), weights.folder, seconds=max(deadline - start, 0.1)
        )
        await self._while_it_answers(server, loading)
        server.adapters.add(weights.version)
        server.load_seconds = time.monotonic() - start

    def _name(self, version: int) -> str:
        name = self.settings.model(version)
        assert name is not None, "a run without adapters"
        return name

    async def _check_version(self, server: Server, weights: Weights) -> None:
        """Do nothing: requests name the version, and a server without this version refuses them."""

    async def _suspects(self, server: Server, folder: str | None, *, whole: bool) -> str:
        found = await self._suspect_tensors(server, self.settings.base) if whole else ""
        seconds = self.settings.update_seconds
        loaded = await server.client.adapter_sums(None, seconds=seconds)
        expected, *_ = await server.client.adapter_sums(folder, seconds=seconds)
        dropped = dropped_parts(loaded, expected)
        lines = [found] if found else []
        if dropped:
            shown = ", ".join(dropped[:_SHOWN]) + (", ..." if len(dropped) > _SHOWN else "")
            count = f"{len(dropped)} of {len(expected)}"
            lines.append(f"it silently ignores {count} parts of the adapter: {shown}")
        return "; ".join(lines)

    async def release(self, server: Server) -> None:
        """Unload adapters of earlier versions that no request needs any more."""
        if server.version is None:
            return
        needed = {server.version, *(each.version for each in server.in_flight)}
        for version in sorted(n for n in server.adapters - needed if n < server.version):
            server.adapters.discard(version)
            with contextlib.suppress(ServerGone, ServerRefused):  # the next request will fail, too
                await server.client.unload_adapter(self._name(version), seconds=CALL_SECONDS)


def dropped_parts(
    workers: Sequence[Mapping[str, float]], expected: Mapping[str, float]
) -> list[str]:
    """Return the parts of an adapter that a server does not use, such as `layers.0.mlp.gate_proj`.

    workers: the sums of each worker of the server; the workers split or copy the parts. expected:
    the sums of the adapter's file.
    """
    return [
        name
        for name, total in expected.items()
        if sum(each.get(name, 0.0) for each in workers) < _LEAST * total
    ]
