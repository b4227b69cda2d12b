"""Python objects that the driver makes in a step. Some are made for each sequence, but none for
each token."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from functools import partial

import pytest
import torch

from gspo_megatron.batching.micro_batches import MicroBatchBuilder
from gspo_megatron.batching.plan import plan_step
from gspo_megatron.batching.redistribute import gather_index, redistribute
from gspo_megatron.models.optimizer import Schedule, build_trainer
from gspo_megatron.objectives import build_objective
from gspo_megatron.platform.groups import data_parallel_group
from gspo_megatron.rl.loop import update_policy
from gspo_megatron.rl.policy_update import PolicyUpdater
from gspo_megatron.rollout.engine import Requests, Sampling
from gspo_megatron.rollout.megatron.engine import MegatronEngine
from gspo_megatron.types import RolloutBatch
from tests.unit.models.one_rank import PAD, VOCABULARY, tiny_config, tiny_policy

pytestmark = pytest.mark.usefixtures("one_rank")

SEQUENCES, PROMPT = 64, 4
SHORT, LONG = 32, 256  # tokens of a response
LEAST_BYTES = 8  # the smallest size of a number in a Python list; large numbers take 28 bytes more


def peak_bytes(run: Callable[[], object]) -> int:
    """The peak memory of the Python objects that a call makes, without the memory of tensors."""
    gc.collect()
    tracemalloc.start()
    try:
        run()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def assert_none_for_each_token(run: Callable[[int], object]) -> None:
    """Check that no object is made for each token. `run` is called with the number of tokens of a
    response."""
    for length in (SHORT, LONG):
        run(length)  # the first call makes objects that are kept
    short, long = (peak_bytes(partial(run, length)) for length in (SHORT, LONG))
    extra = SEQUENCES * (LONG - SHORT)
    assert long - short < 0.5 * LEAST_BYTES * extra


def batch_of(length: int) -> RolloutBatch:
    generator = torch.Generator().manual_seed(length)
    numbers = torch.arange(SEQUENCES)
    tokens = torch.randint(VOCABULARY, (SEQUENCES * (PROMPT + length),), generator=generator)
    return RolloutBatch(
        tokens=tokens,
        prompt_lengths=torch.full_like(numbers, PROMPT),
        response_lengths=torch.full_like(numbers, length),
        rollout_logprobs=torch.full((SEQUENCES * length,), 1 / VOCABULARY).log(),
        truncated=torch.zeros(SEQUENCES, dtype=torch.bool),
        sample_index=numbers,
        group_index=numbers // 4,
    )


def test_an_update_makes_none_for_each_token() -> None:
    config, policy = tiny_config(objective={"mini_batches": 2}), tiny_policy()
    trainer = build_trainer(policy, config.optimizer, Schedule(1e-3, 1e-3, 0, 1, "constant"))
    builder, group = MicroBatchBuilder(policy, PAD, 1.0), data_parallel_group()
    objective = build_objective(config.objective, LONG)
    updater = PolicyUpdater(policy, trainer, builder, objective, config.objective)
    rewards = torch.linspace(0.0, 1.0, SEQUENCES, dtype=torch.float64)

    def update(length: int) -> None:
        batch = batch_of(length)
        index = gather_index(batch, rewards, group)
        plan = plan_step(
            index.lengths,
            index.masked_lengths,
            mini_batches=2,
            data_parallel_size=1,
            token_budget=SEQUENCES * (PROMPT + LONG),
            micro_batch_multiple=1,
        )
        advantages = objective.advantages.of_sequences(rewards, torch.tensor(index.groups))
        sequences = redistribute(
            batch,
            index,
            plan,
            group,
            context_parallel_size=1,
            token_advantages=None,
        )
        update_policy(updater, sequences, index, plan, advantages)

    assert_none_for_each_token(update)


def test_rollouts_make_none_for_each_token() -> None:
    policy = tiny_policy()
    engine = MegatronEngine(policy, pad_id=PAD, eos_id=VOCABULARY)
    requests = Requests([(1,) * PROMPT] * 2, range(2), SEQUENCES // 2)

    def roll_out(length: int) -> None:
        batch = engine.generate(requests, Sampling(max_tokens=length), seed=1)
        assert batch.response_lengths.tolist() == [length] * SEQUENCES

    assert_none_for_each_token(roll_out)
