"""What an asynchronous run computes depends only on its store. With the same files, one rank and
every layout compute the same losses and gradients.

In these tests the service's own code writes the files of the store. The responses have routes, and
tokens of several weights versions. The ranks read the files as in a run with servers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.numpy import load, save

from gspo_megatron.batching.micro_batches import MicroBatchBuilder
from gspo_megatron.batching.redistribute import gather_index, redistribute
from gspo_megatron.config import Config
from gspo_megatron.errors import DataError
from gspo_megatron.models.optimizer import Schedule, build_trainer
from gspo_megatron.objectives import build_objective
from gspo_megatron.platform.groups import data_parallel_group, tear_down_model_parallel
from gspo_megatron.rl.loop import update_policy
from gspo_megatron.rl.policy_update import PolicyUpdater
from gspo_megatron.rl.rollouts import Experience
from gspo_megatron.rl.served_rollouts import ServedRollouts
from gspo_megatron.rollout.engine import RolloutRequest, Sampling
from gspo_megatron.rollout.episodes import assemble, played_turn
from gspo_megatron.rollout.store import FOLDER, SUFFIX, RequestFile, read_groups
from gspo_megatron.rollout.types import RolloutGroup
from gspo_megatron.rollout.vllm.worker.gspo_vllm_answers import Response
from gspo_megatron.types import Prompt
from gspo_megatron.verify.parity import Recorder, plan_alike
from gspo_megatron.verify.results import StepResult, compare
from tests.parallel.models import NO_ROUTER_LOSSES, ODD_MOE, VOCAB_SIZE, build_on_ranks, odd_moe
from tests.parallel.pool import Pool
from tests.parallel.updates import CUT

STEPS, PROMPTS, GROUP, STALENESS = 4, 5, 3, 2
LAYERS, EXPERTS, TOP_K = (
    ODD_MOE[name] for name in ("num_layers", "num_moe_experts", "moe_router_topk")
)
TOLERANCE = 1e-5  # for fp32, after several optimizer updates
# times of the service, which are the same on all ranks of a step
SECONDS = ("teacher_seconds", "model_seconds")


class Tokenizer:
    """A tokenizer whose texts are lists of token ids."""

    pad_id, eos_ids = 0, (2,)

    def decode(self, token_ids: Sequence[int]) -> str:
        return " ".join(map(str, token_ids))


def config_of(layout: str, folder: Path, old_logprobs: str, bound: int | None) -> Config:
    objective = {
        "name": "gspo",
        "clip_low": 0.04,
        "clip_high": 0.04,
        "mini_batches": 2,
        "old_logprobs": old_logprobs,
    }
    config = odd_moe(layout, objective, routing={"replay": "r3"}, **NO_ROUTER_LOSSES)
    rollout = {
        "engine": "vllm",
        "max_staleness": STALENESS,
        "prompts_per_step": PROMPTS,
        "group_size": GROUP,
    }
    logging = config.logging.model_copy(update={"dir": str(folder)})
    # With a tiny epsilon, Adam would make a full step from the rounding error of a gradient near 0.
    optimizer = config.optimizer.model_copy(update={"epsilon": 1e-3})
    changed = {"logging": logging, "optimizer": optimizer}
    changed["rollout"] = config.rollout.model_copy(update=rollout)
    changed["objective"] = config.objective.model_copy(update={"max_token_staleness": bound})
    return config.model_copy(update=changed)


def draw_of(step: int) -> RolloutRequest:
    rows = [(step * PROMPTS + n) % len(PROMPT_IDS) for n in range(PROMPTS)]
    version = max(step - 1 - STALENESS, 0)
    name = f"step_{step:08d}_0"
    return RolloutRequest(
        name, "data.prompts", rows, 0, GROUP, Sampling(max_tokens=20), step, version
    )


PROMPT_IDS = [
    np.random.default_rng(n).integers(3, VOCAB_SIZE, 1 + n % 5).tolist() for n in range(7)
]


def write_bank(folder: Path, has_turns: bool) -> None:
    """Write the groups of all steps, as a service does. `has_turns`: responses have several turns.
    Between the turns are tokens that the policy did not write."""
    random = np.random.default_rng(11)
    for step in range(1, STEPS + 1):
        draw = draw_of(step)
        file = RequestFile(folder / FOLDER / f"{draw.name}{SUFFIX}", {"step": step})
        # the groups are finished in a random order
        for number in random.permutation(PROMPTS).tolist():
            prompt = PROMPT_IDS[draw.rows[number]]
            samples = range(number * GROUP, (number + 1) * GROUP)
            given = [response(random, len(prompt), draw.version, step - 1) for _ in samples]
            ids = np.array(prompt, np.int32)
            played = [played_turn(ids, each) for each in given]
            group = assemble(played, samples, GROUP, has_episodes=False)
            group.rewards = group.shaped = random.random(GROUP)
            group.parts, group.part_names = np.zeros((GROUP, 0)), ()
            group.failed_calls, group.reward_seconds = np.zeros(3, np.int64), np.full(1, 0.25)
            group.teacher_seconds, group.model_seconds = np.full(1, 0.5), np.full(1, 0.125)
            if has_turns:
                group.sampled = random.random(len(group.versions)) < 0.7
                group.in_response = in_two_branches(group)
            file.append(group)
        file.close()


def in_two_branches(group: RolloutGroup) -> np.ndarray:
    """Return [tokens] bool: which tokens belong to a response. If prompt and response are long
    enough, the last token of the prompt becomes the response of a first branch, and the first token
    of the response becomes the prompt of a second branch."""
    kinds = []
    for prompt, length in zip(group.prompt_lengths, group.response_lengths, strict=True):
        kind = np.arange(prompt + length) >= prompt
        if prompt > 1 and length > 1:
            kind[prompt - 1 : prompt + 1] = True, False
        kinds.append(kind)
    return np.concatenate(kinds)


def response(random: np.random.Generator, prompt: int, oldest: int, newest: int) -> Response:
    """A response of random tokens with experts. The weights versions of its tokens rise."""
    count = int(random.integers(1, 20))
    versions = np.sort(random.integers(oldest, newest + 1, count)).astype(np.int32)
    routes = random.permuted(
        np.tile(np.arange(EXPERTS, dtype=np.uint8), (prompt + count, LAYERS, 1)), axis=-1
    )[..., :TOP_K].copy()
    routes[:, 0] = 0  # the first layer is dense
    routes[-1] = 0  # the last token of a response is never an input
    return Response(
        token_ids=random.integers(3, VOCAB_SIZE, count).astype(np.int32),
        logprobs=random.normal(-4.0, 0.05, count).astype(np.float32),
        truncated=bool(count == 19),
        routes=routes,
        versions=versions,
    )


def trained_from_the_bank(config: Config) -> tuple[list[dict[str, float]], StepResult]:
    """The metrics of each step, and the gradients of the last update. All ranks must call this."""
    policy = build_on_ranks(config)
    rate = config.optimizer.learning_rate
    trainer = build_trainer(policy, config.optimizer, Schedule(rate, rate, 0, 1, "constant"))
    recorder = Recorder(trainer.optimizer, trainer.scheduler, policy)
    prompts = [Prompt("p", "", f"f:{n}", {}, tuple(ids)) for n, ids in enumerate(PROMPT_IDS)]
    inputs: Any = SimpleNamespace(tokenizer=Tokenizer(), files={"data.prompts": prompts})
    source = ServedRollouts(config, inputs, policy, torch.device("cpu"))
    builder = MicroBatchBuilder(policy, Tokenizer.pad_id, config.rollout.temperature)
    objective = build_objective(config.objective, 20)
    updater = PolicyUpdater(policy, recorder, builder, objective, config.objective, config.routing)
    group, kept = data_parallel_group(), []
    for step in range(1, STEPS + 1):
        source.version = step - 1
        numbers = range(group.rank(), PROMPTS, group.size())
        drawn = source.read(draw_of(step), numbers)
        experience = Experience(drawn.group, torch.device("cpu"))
        index = gather_index(experience.batch, experience.shaped, group)
        advantages, _ = objective.advantages.of_step(index.rewards, index.groups, experience.turns)
        plans = plan_alike(config, index.lengths, index.masked_lengths, CUT, 2)
        sequences = redistribute(
            experience.batch,
            index,
            plans,
            group,
            context_parallel_size=policy.config.context_parallel_size,
        )
        metrics = update_policy(updater, sequences, index, plans, advantages)
        ages = torch.tensor([drawn.staleness.sum(), (drawn.staleness > 1).sum()])
        dist.all_reduce(ages, group=group)
        total, old = ages.tolist()
        learnt = float(sum(index.masked_lengths))
        counts = {"ages": float(total), "old": float(old), "learnt": learnt}
        busy = {name: float(getattr(drawn.group, name).sum()) for name in SECONDS}
        kept.append({**metrics, **counts, **busy})
    tear_down_model_parallel()
    return kept, StepResult(kept[-1], recorder.gradients, recorder.replica_error)


def written(folder: Path, step: int) -> list[RolloutGroup]:
    """The groups that the store has for a step."""
    path = folder / FOLDER / f"{draw_of(step).name}{SUFFIX}"
    return list(read_groups(path).values())


@pytest.mark.parametrize(("old_logprobs", "bound"), [("rollout", None), ("recompute", 1)])
def test_every_layout_computes_the_same_from_the_bank(
    pool: Pool, tmp_path: Path, old_logprobs: str, bound: int | None
) -> None:
    write_bank(tmp_path, has_turns=bound is None)
    asked = tmp_path, old_logprobs, bound
    on_one = pool.on(config_of("tp=1", *asked), trained_from_the_bank)
    for layout in ("tp=2,pp=2,ep=2,dp=1", "dp=2,ep=2,cp=2"):
        steps, result = pool.on(config_of(layout, *asked), trained_from_the_bank)
        for found, expected in zip(steps, on_one[0], strict=True):
            for name in ("ages", "old", "learnt", *SECONDS):
                assert found[name] == expected[name]
            assert found["loss"] == pytest.approx(expected["loss"], rel=TOLERANCE, abs=1e-7)
            assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=TOLERANCE)
        name, error = compare(on_one[1].gradients, result.gradients)[0]
        assert error <= TOLERANCE, f"{layout}: {name} is off by {error:.1e}"
    last = on_one[0][-1]
    assert [last[name] for name in SECONDS] == [0.5 * PROMPTS, 0.125 * PROMPTS]
    assert last["old"] > 0  # some tokens are more than one version old
    groups = written(tmp_path, STEPS)
    tokens = sum(group.response_lengths.sum() for group in groups)
    if bound is None:
        assert 0 < last["learnt"] == sum(group.sampled.sum() for group in groups) < tokens
    else:
        assert last["learnt"] == tokens - last["old"]
    assert on_one[0][0]["grad_norm"] > 0


def a_group(number: int) -> RolloutGroup:
    played = [
        played_turn(np.arange(9, dtype=np.int32), response(np.random.default_rng(1), 9, 0, 1))
    ]
    group = assemble(played, [number], 1, has_episodes=False)
    return replace(group, rewards=np.ones(1), shaped=np.ones(1))


def reading(path: Path) -> str:
    """The error that a rank gets when each rank reads the group whose number is the rank's
    number."""
    try:
        ServedRollouts._read(path, [dist.get_rank()], dist.get_rank())
    except DataError as error:
        return str(error)
    return ""


def write_two(path: Path) -> None:
    file = RequestFile(path, {})
    for number in range(2):
        file.append(a_group(number))
    file.close()


def test_a_group_that_is_damaged_after_it_was_written_is_told_on_all_ranks(
    pool: Pool, tmp_path: Path
) -> None:
    path = tmp_path / f"step_00000001_0{SUFFIX}"
    write_two(path)
    assert pool.run(2, reading, path=path) == ["", ""]
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert pool.run(2, reading, path=path) == [
        f"{path}: another rank cannot read its groups",
        f"{path}: damaged since it was written: groups [1] are missing",
    ]


def test_a_group_with_too_few_columns_is_told_on_all_ranks(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.groups"
    write_two(path)
    file, save_all = RequestFile(path, {}), RolloutGroup.save
    file.finished.clear()

    def without_tokens(group: RolloutGroup) -> bytes:
        columns = load(save_all(group))
        del columns["tokens"]
        return save(columns)

    monkeypatch.setattr(RolloutGroup, "save", without_tokens)
    file.append(a_group(1))  # if two records have the same number, the later one counts
    file.close()
    assert pool.run(2, reading, path=path) == [
        f"{path}: another rank cannot read its groups",
        f"{path}: damaged since it was written: group 1 lacks tokens",
    ]
