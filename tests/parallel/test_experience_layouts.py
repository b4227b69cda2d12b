"""Dynamic sampling and rewards of turns choose the same batch on every layout."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from megatron.core import parallel_state

from gspo_megatron.batching.redistribute import gather_index, redistribute
from gspo_megatron.config import Config
from gspo_megatron.environments.single_turn import SingleTurn
from gspo_megatron.objectives.advantages import build_advantages
from gspo_megatron.rewards import Reward
from gspo_megatron.rl.loop import compute_advantages
from gspo_megatron.rl.rollouts import Collector, collect
from gspo_megatron.rollout.engine import Sampling
from gspo_megatron.rollout.megatron import MegatronEngine
from gspo_megatron.types import Prompt, Sample, TurnRewards
from tests.parallel.models import VOCAB_SIZE, build_on_ranks, odd_moe
from tests.parallel.pool import Pool

GROUP, PROMPTS = 3, 3
SAMPLING = Sampling(max_tokens=8)
# Kept are groups 1, 3 and 4: of two data ranks one holds two of them and the other one, of four one
# holds none. Group 5 is one too many, and a third round is not drawn.
ANSWERS = ["flat", "", "flat", "", "", "", "", "", ""]
KEPT = [1, 3, 4]
PAD_ID, EOS_ID = 0, 2
TURN = 3  # tokens


class Tokenizer:
    """Token ids as words."""

    eos_ids = (EOS_ID,)

    def decode(self, token_ids: Sequence[int]) -> str:
        return " ".join(map(str, token_ids))


def reward_of_turns(sample: Sample) -> TurnRewards:
    """Turns of three tokens, worth the sum of these; nothing where the answer is "flat"."""
    ends = [*range(TURN, sample.num_tokens, TURN), sample.num_tokens]
    if sample.answer == "flat":
        return TurnRewards([0.0] * len(ends), ends)
    ids = [int(word) for word in sample.response.split()]
    return TurnRewards([sum(ids[max(0, end - TURN) : end]) / 64 for end in ends], ends)


@dataclass
class Received:
    """One sequence of the step, as a rank that trains on it has it."""

    tokens: list[int]
    group: int
    reward: float
    token_advantages: list[float]


def step(config: Config, prompts: list[list[int]]) -> tuple[dict[int, Received], dict[str, float]]:
    """This rank's sequences of a step by their number, and its metrics. Sequence n goes to
    data-parallel rank n % size, from wherever it was sampled."""
    engine = MegatronEngine(build_on_ranks(config), pad_id=PAD_ID, eos_id=EOS_ID)
    reward = Reward("turns", reward_of_turns)
    collector = Collector(config, engine, SingleTurn(Tokenizer()), reward, torch.device("cpu"))
    drawn = iter(
        Prompt(f"prompt {n}", answer, f"f:{n}", {}, tuple(ids))
        for n, (ids, answer) in enumerate(zip(prompts, ANSWERS, strict=True))
    )
    experience = collect(
        collector,
        lambda: [next(drawn) for _ in range(config.rollout.prompts_per_step)],
        SAMPLING,
        21,
    )
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    index = gather_index(experience.batch, experience.scores.shaped, group)
    _, advantages = compute_advantages(build_advantages(config.objective), experience, index)
    size = parallel_state.get_data_parallel_world_size()
    owners = [n % size for n in range(len(index.lengths))]
    received = redistribute(experience.batch, index, owners, group, token_advantages=advantages)
    assert received.token_advantages is not None
    found = {}
    for number, tokens in received.tokens.items():
        start = received.offsets[number]
        own = received.token_advantages[start : start + index.response_lengths[number]]
        reward = float(index.rewards[number])
        found[number] = Received(tokens.tolist(), index.groups[number], reward, own.tolist())
    return found, experience.metrics


def config_of(layout: str) -> Config:
    config = odd_moe(layout, {"name": "gspo_token"})
    rollout: dict[str, Any] = {
        "dynamic_sampling": True,
        "group_size": GROUP,
        "prompts_per_step": PROMPTS,
    }
    rollout["max_response_tokens"] = SAMPLING.max_tokens
    sections = {"rollout": rollout, "reward": {"scale": 0.5, "clip": 0.6}}
    changed = {k: getattr(config, k).model_copy(update=v) for k, v in sections.items()}
    return config.model_copy(update=changed)


def collected(pool: Pool, layout: str) -> tuple[dict[int, list[Received]], dict[str, float]]:
    """Each sequence as the ranks that train on it have it, and the metrics of all ranks."""
    draw = random.Random(7)
    prompts = [[draw.randrange(3, VOCAB_SIZE) for _ in range(2 + n % 3)] for n in range(9)]
    answers = pool.each(config_of(layout), step, prompts=prompts)
    assert all(metrics == answers[0][1] for _, metrics in answers)
    numbers = {number for received, _ in answers for number in received}
    copies = {n: [received[n] for received, _ in answers if n in received] for n in numbers}
    return copies, answers[0][1]


@pytest.fixture(scope="module")
def of_one_rank(pool: Pool) -> tuple[dict[int, list[Received]], dict[str, float]]:
    return collected(pool, "tp=1")


def test_one_rank_keeps_the_first_groups_with_spread(
    of_one_rank: tuple[dict[int, list[Received]], dict[str, float]],
) -> None:
    sequences, metrics = of_one_rank
    assert [sequences[n][0].group for n in sorted(sequences)] == [g for g in KEPT for _ in range(3)]
    assert metrics["rollout/refills"] == 1
    assert metrics["rollout/groups_dropped"] == 3
    assert metrics["reward/zero_spread_groups"] == pytest.approx(2 / 6)
    assert metrics["reward/mean"] > 2 * metrics["reward/shaped_mean"]  # clipped at times
    for group in KEPT:
        # turns of three tokens: the first of each carries the turn's advantage
        turns = [
            advantage
            for copies in sequences.values()
            if copies[0].group == group
            for advantage in copies[0].token_advantages[::TURN]
        ]
        assert len(turns) > GROUP
        assert statistics.mean(turns) == pytest.approx(0, abs=1e-6)
        assert statistics.stdev(turns) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("layout", ["dp=2", "tp=2,pp=2", "dp=4,ep=4", "cp=2"])
def test_the_batch_is_that_of_one_rank(
    pool: Pool,
    of_one_rank: tuple[dict[int, list[Received]], dict[str, float]],
    layout: str,
) -> None:
    expected, expected_metrics = of_one_rank
    sequences, metrics = collected(pool, layout)
    assert metrics == pytest.approx(expected_metrics, rel=1e-12)
    assert sequences.keys() == expected.keys()
    for number, copies in sequences.items():
        wanted = expected[number][0]
        for received in copies:
            assert received.tokens == wanted.tokens
            assert received.group == wanted.group
            assert received.reward == wanted.reward
            assert received.token_advantages == pytest.approx(wanted.token_advantages, abs=1e-6)
