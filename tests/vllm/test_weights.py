"""The check of new weights. A server serves the trainer's weights, or it does not serve at all.

In these tests transformers computes the trainer's responses for the check, so they share no code
with the servers.
"""

from __future__ import annotations

import asyncio
import functools
import shutil
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3MoeForCausalLM

from gspo_megatron.errors import RolloutError
from gspo_megatron.rollout.vllm.checks import Needs
from gspo_megatron.rollout.vllm.client import ServerClient, connected_session
from gspo_megatron.rollout.vllm.server import FleetSettings, Server
from gspo_megatron.rollout.vllm.weight_check import (
    NOT_THE_WEIGHTS,
    WeightCheck,
    check_prompts,
    tolerances,
)
from gspo_megatron.rollout.vllm.weights import Weights
from gspo_megatron.rollout.vllm.worker.gspo_vllm_answers import ModelFacts
from tests.fleets import ScheduledFleet
from tests.vllm.servers import Server as Running
from tests.vllm.servers import run_options, serve

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
VOCABULARY, LAYERS, EXPERTS, TOP_K = 257, 4, 8, 2
FACTS = ModelFacts(VOCABULARY, LAYERS, EXPERTS, TOP_K, tuple(range(LAYERS)))
SETTINGS = FleetSettings(
    facts=FACTS,
    needs=Needs(max_model_len=2048, dtype="float32", with_routes=True),
    restarts=0,
    update_seconds=60,
    silence_seconds=60,
)
# The relative size of one policy update. It changes the log-probs of sampled tokens by about 1e-2.
# A test asserts a mean above 1e-3.
STEP = 3e-3


@pytest.fixture(scope="module")
def second_server(
    vllm_python: Path, tiny_qwen3_moe: Callable[[int], Path], tmp_path_factory: Any
) -> Iterator[Running]:
    with serve(
        vllm_python, tmp_path_factory.mktemp("vllm_2"), run_options(tiny_qwen3_moe(0))
    ) as server:
        yield server


@pytest.fixture(scope="session")
def old(tiny_qwen3_moe: Callable[[int], Path]) -> Path:
    return tiny_qwen3_moe(0)


@pytest.fixture(scope="session")
def new(old: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the weights after one more update."""
    generator = torch.Generator().manual_seed(3)
    return changed(
        old,
        tmp_path_factory.mktemp("new") / "model",
        lambda name, tensor: (
            tensor + STEP * tensor.std() * torch.randn(tensor.shape, generator=generator)
        ),
    )


def changed(folder: Path, to: Path, change: Callable[[str, torch.Tensor], torch.Tensor]) -> Path:
    """A copy of a Hugging Face folder with changed tensors."""
    shutil.copytree(folder, to)
    tensors = load_file(to / "model.safetensors")
    save_file(
        {name: change(name, tensor).clone() for name, tensor in tensors.items()},
        to / "model.safetensors",
        {"format": "pt"},
    )
    return to


@functools.cache
@torch.no_grad()
def check_of(folder: Path) -> WeightCheck:
    """The data of the check: greedy responses of transformers to random prompts, computed token by
    token without a cache."""
    model = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found: list[list[Any]] = [[], [], []]
    asked = [(ids, count) for each, count in check_prompts(VOCABULARY, 1024) for ids in each]
    for prompt, count in asked:
        ids, logprobs = torch.tensor([prompt]), []
        for _ in range(count):
            best = torch.log_softmax(model(ids).logits[:, -1], -1).max(-1)
            ids = torch.cat([ids, best.indices[:, None]], 1)
            logprobs.append(float(best.values))
        answer = ids[0, len(prompt) :].tolist()
        for values, value in zip(found, (prompt, answer, logprobs), strict=True):
            values.append(value)
    return WeightCheck(*found, *tolerances("fp32", vocab_size=VOCABULARY, on_cpu=True))


def served(
    running: list[Running],
    work: Callable[[ScheduledFleet], Awaitable[Any]],
    client: Callable[..., ServerClient] = ServerClient,
) -> Any:
    """Run `work` with a fleet of running servers. `client` is the class of the client for the last
    server."""

    async def run() -> Any:
        async with connected_session() as session:
            kinds = [*(ServerClient,) * (len(running) - 1), client]
            servers = [
                Server(f"server {number}", kind(each.url, session))
                for number, (kind, each) in enumerate(zip(kinds, running, strict=True))
            ]
            async with ScheduledFleet(servers, SETTINGS) as fleet:
                return await work(fleet)

    return asyncio.run(run())


def weights(version: int, folder: Path, like: Path | None = None) -> Weights:
    """Weights in `folder`. The trainer has the weights of `like`."""
    return Weights(version, str(folder), check_of(like or folder))


def test_servers_with_the_trainers_weights_serve_and_each_update_moves_them(
    vllm_server: Running, second_server: Running, old: Path, new: Path
) -> None:
    before, after = check_of(old), check_of(new)
    first = [np.array([each[0] for each in check.logprobs]) for check in (before, after)]
    moved = np.abs(first[0] - first[1])
    # Later tokens may follow different texts, so only first tokens of responses are compared.
    assert moved.mean() > 1e-3

    async def work(fleet: ScheduledFleet) -> None:
        for version, folder in enumerate([old, new, old, new]):
            await fleet.update(weights(version, folder))
            assert [each.version for each in fleet.servers] == [version, version]
            sampling = {"temperature": 1.0, "max_tokens": 5, "seed": 1, "ignore_eos": True}
            response = await fleet.generate([1, 2, 3], sampling, version)
            assert len(response.token_ids) == 5 and response.routes.shape == (8, LAYERS, TOP_K)

    served([vllm_server, second_server], work)


def one_expert_left_behind(old: Path, new: Path, to: Path) -> Path:
    kept = load_file(old / "model.safetensors")
    return changed(
        new, to, lambda name, tensor: kept[name] if ".layers.2.mlp.experts.5." in name else tensor
    )


def one_layer_twice(old: Path, new: Path, to: Path) -> Path:
    found = load_file(new / "model.safetensors")
    return changed(
        new, to, lambda name, tensor: found[name.replace(".layers.1.mlp.", ".layers.2.mlp.")]
    )


@pytest.mark.parametrize("sabotage", [one_expert_left_behind, one_layer_twice])
def test_weights_that_did_not_all_arrive_are_found(
    vllm_server: Running,
    old: Path,
    new: Path,
    tmp_path: Path,
    sabotage: Callable[[Path, Path, Path], Path],
) -> None:
    sent = sabotage(old, new, tmp_path / "sent")

    async def work(fleet: ScheduledFleet) -> None:
        await fleet.update(weights(0, old))
        with pytest.raises(RolloutError, match="does not have the trainer's weights") as caught:
            await fleet.update(weights(1, sent, like=new))
        # The server has loaded the weights that it was told to load.
        assert "the checksums of its tensors equal the folder's" in str(caught.value)
        with pytest.raises(RolloutError, match="no server is left"):
            await fleet.generate([1, 2], {"temperature": 1.0, "max_tokens": 2}, 1)

    served([vllm_server], work)


@pytest.mark.parametrize("at_start", [True, False])
def test_tensors_that_are_not_the_folder_s_are_named_by_family_and_layer(
    vllm_server: Running, old: Path, new: Path, tmp_path: Path, at_start: bool
) -> None:
    """During an update, only responses can show wrong tensors. At the start of a server, the check
    finds wrong tensors even if they do not change any log-prob."""
    step = 1e-6 if at_start else 1.0
    wrong = (".layers.1.mlp.experts.3.up_proj.", ".layers.1.mlp.experts.7.", ".3.input_layernorm.")

    def change(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor * (1 + step) if any(part in name for part in wrong) else tensor

    sabotaged = changed(new, tmp_path / "sabotaged", change)

    class Sabotaged(ServerClient):
        async def load_weights(self, folder: str, version: str, **options: Any) -> None:
            sent = sabotaged if at_start or version == "1" else folder
            await super().load_weights(str(sent), version, **options)

    async def work(fleet: ScheduledFleet) -> None:
        version = 0
        if not at_start:
            await fleet.update(weights(0, old))
            version = 1
        with pytest.raises(RolloutError) as caught:
            await fleet.update(weights(version, new))
        told = str(caught.value)
        assert told.endswith("different from the folder: experts of layer 1; norms of layer 3")
        assert ("log-probs" in told) is not at_start

    served([vllm_server], work, Sabotaged)


class LeftBehind(ServerClient):
    """A server that reports the new version but does not load it."""

    async def load_weights(self, folder: str, version: str, **options: Any) -> None:
        if version != "0":
            await self._call("POST", "/update_weight_version", {"new_version": version}, seconds=9)
        else:
            await super().load_weights(folder, version, **options)


class OldCache(ServerClient):
    """A server that keeps its prefix cache during an update. Before the first weights it clears the
    cache, because an earlier test may have used other weights."""

    updates = False

    async def load_weights(self, folder: str, version: str, **options: Any) -> None:
        self.updates = version != "0"
        await super().load_weights(folder, version, **options)

    async def _call(self, verb: str, path: str, *given: Any, **options: Any) -> Any:
        if self.updates and path == "/reset_prefix_cache":
            return None
        if self.updates and path == "/pause":
            options["query"] = {"mode": "keep", "clear_cache": "false"}
        return await super()._call(verb, path, *given, **options)


@pytest.mark.parametrize("client", [LeftBehind, OldCache])
def test_a_server_that_was_left_behind_serves_nothing_and_the_other_goes_on(
    vllm_server: Running,
    second_server: Running,
    old: Path,
    new: Path,
    client: type[ServerClient],
) -> None:
    async def work(fleet: ScheduledFleet) -> None:
        await fleet.update(weights(0, old))
        await fleet.update(weights(1, new))
        sound, broken = fleet.servers
        assert (sound.version, broken.version) == (1, None)
        assert NOT_THE_WEIGHTS in str(broken.why_out)
        assert fleet.problems() == [f"server 1: {broken.why_out}"]
        for _ in range(3):
            await fleet.generate([1, 2], {"temperature": 1.0, "max_tokens": 2}, 1)

    served([vllm_server, second_server], work, client)
