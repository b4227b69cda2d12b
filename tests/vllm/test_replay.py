"""Routing Replay with the experts of a real server (r3): the gradients of the next update.

A run gets responses and their experts from vLLM, and keeps the inputs of the step. The test
computes the step again from these inputs: with the server's experts, with the experts that the
in-process engine records for the same responses, and with experts that are wrong on purpose.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml
from safetensors.torch import load_file
from torch import Tensor

from gspo_megatron.config import Config, Layout, apply_layout, parse_config
from gspo_megatron.models.build import Policy
from gspo_megatron.rl.rollouts import Experience
from gspo_megatron.rl.step_inputs import StepInputs, read_experience
from gspo_megatron.rollout.engine import Requests, Sampling
from gspo_megatron.rollout.megatron.engine import MegatronEngine
from gspo_megatron.types import RolloutBatch
from gspo_megatron.verify import parity
from tests.parallel.pool import Pool
from tests.parallel.test_replay import Watched, watched
from tests.vllm.runs import make_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
LAYERS, EXPERTS = 4, 8  # sizes of the preset tiny
LAYOUTS = ("tp=1", "pp=2,ep=2,dp=2")


@pytest.fixture(scope="module")
def dumped(
    vllm_python: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Config, StepInputs]:
    """The configuration of a run with two data ranks, and the inputs of its only step."""
    run = make_run(
        tmp_path_factory.mktemp("dumped"),
        vllm_python,
        parallel={"layout": "dp=2,ep=2"},
        objective={"name": "gspo", "mini_batches": 1},
        routing={"replay": "r3"},
        # The tokens are counted, so each response has a prompt of its own.
        training={
            "steps": 1,
            "precision": "fp32",
            "keep_step_inputs": 1,
            "share_prompts": False,
        },
    )
    run.finish(run.start())
    config = parse_config(yaml.safe_load((run.folder / "config.yaml").read_text()))
    return config, StepInputs.read(run.out, 1)


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    processes = Pool()
    yield processes
    processes.close()


def recorded_by_the_engine(batch: RolloutBatch, policy: Policy) -> Tensor:
    """The routes [tokens, layers of this stage, k] that the in-process engine records for the
    sequences. The engine gets all tokens of each sequence except the last one."""
    engine = MegatronEngine(policy, pad_id=0, eos_id=(), record_routes=True)
    sequences = batch.tokens.split((batch.prompt_lengths + batch.response_lengths).tolist())
    given = [sequence[:-1].tolist() for sequence in sequences]
    found = engine.generate(Requests(given, range(len(given))), Sampling(max_tokens=1), seed=0)
    return found.routes


def update(config: Config, kept: StepInputs, routes: str) -> Watched:
    """Compute the update of the kept step on these ranks. routes: "server", "engine", or "next",
    which adds 1 to the server's experts in one layer."""

    def read(folder: Path, description: Mapping[str, Any], policy: Policy) -> Experience:
        experience = read_experience(folder, description, policy)
        batch, layers = experience.batch, parity.attach_hooks(policy.models)
        if routes == "engine":
            batch.routes = recorded_by_the_engine(batch, policy)
        elif routes == "next" and 2 in layers:
            of_layer = batch.routes[:, layers.index(2)]
            is_known = (batch.routes != 0).flatten(1).any(1)
            of_layer[is_known] = (of_layer[is_known] + 1) % EXPERTS
        return experience

    task = parity.Task(config, kept.vocab_size, parity.Cut(replicas=2), kept)
    with mock.patch.object(parity, "read_experience", read):
        return watched(parity._run_kept_step, task=task, inputs=kept)


def distance(one: Watched, other: Watched) -> float:
    """The largest difference between elements of the gradients, relative to the largest element."""
    reference, found = one.result.gradients, other.result.gradients
    assert reference.keys() == found.keys()
    largest = max(float(gradient.abs().max()) for gradient in reference.values())
    return max(float((reference[n] - found[n]).abs().max()) for n in reference) / largest


def routed_tokens(kept: StepInputs) -> int:
    """The number of tokens in the step, without the last token of each sequence, which an engine
    never gets as input."""
    found = 0
    for path in (kept.folder / "rollouts").glob("*_stage_000.safetensors"):
        columns = load_file(path)
        found += int((columns["prompt_lengths"] + columns["response_lengths"] - 1).sum())
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_servers_experts_give_the_gradients_of_the_engines_experts(
    pool: Pool, dumped: tuple[Config, StepInputs], layout: str
) -> None:
    config, kept = dumped
    config = apply_layout(config, Layout.parse(layout))
    server, engine, wrong = (
        pool.on(config, update, kept=kept, routes=routes) for routes in ("server", "engine", "next")
    )
    # The weights are those with which the server generated.
    assert server.result.metrics["mismatch/abs_mean"] <= 1e-5
    for each in (server, engine, wrong):
        assert (each.replayed, each.wrong) == (LAYERS * routed_tokens(kept), 0)
    assert distance(server, engine) <= 1e-6
    # The replayed experts are not those that the routers would choose. We measured a distance of
    # 0.037.
    assert wrong.moved >= routed_tokens(kept) // 2
    assert distance(server, wrong) > 1e-3
