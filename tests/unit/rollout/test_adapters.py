"""Adapters on servers: each version has a name, each adapter is checked, and old names are
removed."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch

from gspo_megatron.config.servers import served_rank
from gspo_megatron.errors import RolloutError
from gspo_megatron.rollout.vllm.adapters import AdapterLoader, dropped_parts
from gspo_megatron.rollout.vllm.checks import Abilities
from gspo_megatron.rollout.vllm.in_flight import InFlightResponse
from gspo_megatron.rollout.vllm.process import (
    WORKER_FOLDER,
    adapter_arguments,
    option_words,
)
from gspo_megatron.rollout.vllm.server import Server
from gspo_megatron.rollout.vllm.weight_check import WeightCheck
from gspo_megatron.rollout.vllm.weights import Weights
from gspo_megatron.rollout.vllm.worker.gspo_vllm_answers import GroupPart, Response
from tests.fleets import ScheduledFleet
from tests.unit.rollout.double import FACTS, Started, fleet_settings

sys.path.append(str(WORKER_FOLDER))
import gspo_vllm_worker as worker

SETTINGS = fleet_settings(max_staleness=1, base="/models/base")
CHECK = WeightCheck([[1, 2]], [[3, 4]], [[-0.5, -0.5]], 1e-4, 1e-4)
PARTS = {"layers.0.self_attn.q_proj": 2.0, "layers.0.mlp.gate": 3.0}


@dataclass
class Recorded:
    """A client that records its requests. Every response is [3, 4]."""

    loaded: Mapping[str, float] = field(default_factory=lambda: dict(PARTS))
    calls: list[tuple[str, str | None]] = field(default_factory=list)

    async def load_adapter(self, name: str, folder: str, **_: Any) -> None:
        self.calls.append(("load", f"{name} {folder}"))

    async def unload_adapter(self, name: str, **_: Any) -> None:
        self.calls.append(("unload", name))

    async def adapter_sums(self, folder: str | None, **_: Any) -> list[Mapping[str, float]]:
        return [self.loaded] if folder is None else [PARTS]

    async def weight_sums(self, folder: str | None, **_: Any) -> list[Mapping[str, Any]]:
        self.calls.append(("sums", folder))
        return [{"attention of layer 0": [4, 1.0, 1.0]}]

    async def generate(self, part: GroupPart, **_: Any) -> Response:
        self.calls.append(("generate", part.model))
        return Response(np.array([3, 4], np.int32), np.full(2, -0.5, np.float32), False)


def a_server(client: Recorded) -> tuple[ScheduledFleet, Server]:
    recorded: Any = client
    abilities = Abilities(is_extended=True, workers=1)
    # the run has started the server, which begins with the base
    server = Server("server", recorded, start=Started, abilities=abilities)
    return ScheduledFleet([server], SETTINGS), server


def test_each_version_has_a_name_and_goes_after_its_last_request() -> None:
    client = Recorded()
    fleet, server = a_server(client)
    loader = fleet.loader
    assert isinstance(loader, AdapterLoader)
    weights = {n: Weights(n, f"/weights/{n}", CHECK) for n in (4, 5, 6)}
    late = InFlightResponse(4)

    async def run() -> None:
        loader.take_weights(weights[4])
        await loader.first_weights(server, weights[4], deadline=1e9)
        sampling = {"temperature": 1.0}
        await fleet.scheduler.generate_all([1, 2], sampling, [(1, 0)], 4)
        server.add_in_flight([late])
        for version in (5, 6):
            loader.take_weights(weights[version])
            await loader.renew(server, weights[version])
        await fleet.scheduler.generate_all([1, 2], sampling, [(1, 0)], 5)
        assert ("unload", "policy-4") not in client.calls
        server.remove_in_flight([late])
        await loader.release(server)

    asyncio.run(run())
    told = [call for call in client.calls if call[0] != "sums"]
    assert told == [
        ("load", "policy-4 /weights/4"),
        ("generate", "policy-4"),
        ("generate", "policy-4"),
        ("load", "policy-5 /weights/5"),
        ("generate", "policy-5"),
        ("load", "policy-6 /weights/6"),
        ("generate", "policy-6"),
        ("unload", "policy-5"),
        ("generate", "policy-6"),
        ("unload", "policy-4"),
    ]
    # The base is checked once, when the server starts, by a comparison with its own folder.
    assert [folder for kind, folder in client.calls if kind == "sums"] == [None, "/models/base"]
    # The response ended with the adapter with which it began.
    assert late.version == 4 and not late.is_taken_back


@pytest.mark.parametrize(
    "left", [{"layers.0.self_attn.q_proj": 2.0}, PARTS | {"layers.0.mlp.gate": 0.0}]
)
def test_parts_that_a_server_drops_are_named(left: dict[str, float]) -> None:
    """At the start of a run every B is zero, so the log-probs agree even if the server drops a
    part."""
    fleet, server = a_server(Recorded(loaded=left))
    weights = Weights(0, "/weights/0", CHECK)

    async def run() -> None:
        fleet.loader.take_weights(weights)
        await fleet.loader.first_weights(server, weights, deadline=1e9)

    with pytest.raises(RolloutError) as error:
        asyncio.run(run())
    assert "silently ignores 1 of 2 parts of the adapter: layers.0.mlp.gate" in str(error)
    assert not server.serves


def test_parts_may_be_cut_or_copied_over_workers_and_rounded() -> None:
    cut = [{"a": 1.0, "b": 2.0}, {"a": 1.0, "b": 1.99}]
    assert dropped_parts(cut, {"a": 2.0, "b": 2.0}) == []
    assert dropped_parts([{"a": 1.985}], {"a": 2.0}) == []
    assert dropped_parts([{"a": 1.9}], {"a": 2.0, "b": 1.0}) == ["a", "b"]


def test_a_restarted_server_forgets_what_it_had() -> None:
    client = Recorded()
    fleet, server = a_server(client)
    server.adapters = {1, 2}
    weights = Weights(7, "/weights/7", CHECK)

    async def run() -> None:
        fleet.loader.take_weights(weights)
        await fleet.loader.first_weights(server, weights, deadline=1e9)
        await fleet.loader.release(server)

    asyncio.run(run())
    assert server.adapters == {7} and "unload" not in {kind for kind, _ in client.calls}


def test_options_of_servers_with_adapters() -> None:
    assert [served_rank(rank) for rank in (1, 4, 8, 9, 64, 300, 512)] == [1, 8, 8, 16, 64, 320, 512]
    words = option_words(adapter_arguments(12, 3))
    assert words == ["--enable-lora", "--max-lora-rank", "16", "--max-loras", "3"]


def test_a_part_of_a_group_names_its_model() -> None:
    part = GroupPart([1], {"temperature": 1.0}, FACTS, False, ["a"], [[1]])
    for model in (None, "policy-3"):
        body = replace(part, model=model).body()
        assert GroupPart.read(body).model == model
        # Without an adapter, the body must not have the field "model", which earlier versions of
        # the middleware do not know.
        assert GroupPart.read(body).request(0).get("model") == model
        assert (b'"model"' in body) == bool(model)


def test_the_parts_of_a_loaded_adapter_are_those_that_layers_compute_with() -> None:
    """The tensors have the form of vLLM 0.30: they are padded, one layer has several matrices, and
    the head is one tensor. Another test takes the tensors from a real server."""

    @dataclass
    class Layer:
        lora_a_stacked: Any

    @dataclass
    class Experts:
        w13_lora_a_stacked: Any
        w2_lora_a_stacked: Any

    slot = torch.zeros(3, 1, 8, 5)
    q, k, head = slot.clone(), slot.clone(), slot.clone()
    q[1, 0, :2], k[1, 0, :2], head[1, 0, 0] = 1.0, 2.0, 3.0
    q[0] = 9.0  # a value that an earlier version has left
    gate, down = torch.ones(3, 4, 8, 5), torch.ones(3, 4, 8, 6)

    @dataclass
    class Manager:
        lora_index_to_id: Any
        modules: Any
        packed_modules: Any

    joint = "model.layers.1.self_attn.qkv_proj"
    parts = [joint.replace("qkv", name) for name in "qk"]
    layers = {
        joint: Layer((q, k)),
        "lm_head": Layer(head),
        "model.layers.1.mlp.experts": Experts((gate, gate), (down,)),
    }
    found = worker._adapter_sums(
        worker._loaded_parts(Manager([3, 4, None], layers, {joint: parts}))
    )
    assert found == {
        "layers.1.self_attn.q_proj": 10.0,
        "layers.1.self_attn.k_proj": 40.0,
        "lm_head": 45.0,
        "layers.1.mlp.experts": 2 * 4 * 8 * 5 + 4 * 8 * 6,
    }
    assert worker._adapter_sums(worker._loaded_parts(Manager([None], layers, {}))) == {}
