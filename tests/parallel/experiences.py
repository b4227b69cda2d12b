"""What the ranks do in test_experience_layouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from gspo_megatron.batching.redistribute import Sequences, StepIndex, gather_index, redistribute
from gspo_megatron.config import Config, resolve_parallel
from gspo_megatron.environments.single_turn import SingleTurn
from gspo_megatron.models.build import build_policy
from gspo_megatron.objectives.advantages import build_advantages
from gspo_megatron.platform.groups import set_up_model_parallel
from gspo_megatron.rewards import Reward
from gspo_megatron.rl.loop import collect, compute_advantages
from gspo_megatron.rl.rollouts import Collector
from gspo_megatron.rollout.engine import Sampling
from gspo_megatron.rollout.megatron import MegatronEngine
from gspo_megatron.types import Prompt, Sample, TurnRewards
from tests.parallel.models import VOCAB_SIZE

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

    rank: int
    tokens: list[int]
    group: int
    reward: float
    token_advantages: list[float]


def step(
    config: Config, prompts: list[list[int]], answers: list[str], sampling: Sampling, seed: int
) -> tuple[list[tuple[int, Received]], list[dict[str, float]]]:
    """All sequences of a step by their number, from all ranks, and each rank's metrics. Sequence n
    goes to data-parallel rank n % size, from wherever it was sampled."""
    parallel = resolve_parallel(config, dist.get_world_size())
    set_up_model_parallel(parallel, config.training.seed)
    policy = build_policy(config, parallel, VOCAB_SIZE)
    engine = MegatronEngine(policy, pad_id=PAD_ID, eos_id=EOS_ID)
    reward = Reward("turns", reward_of_turns)
    collector = Collector(config, engine, SingleTurn(Tokenizer()), reward, torch.device("cpu"))
    drawn = iter(
        Prompt(f"prompt {n}", answer, f"f:{n}", {}, tuple(ids))
        for n, (ids, answer) in enumerate(zip(prompts, answers, strict=True))
    )
    experience = collect(
        collector,
        lambda: [next(drawn) for _ in range(config.rollout.prompts_per_step)],
        sampling,
        seed,
    )
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    index = gather_index(experience.batch, experience.scores.shaped, group)
    size = parallel_state.get_data_parallel_world_size()
    _, advantages = compute_advantages(build_advantages(config.objective), experience, index)
    owners = [n % size for n in range(len(index.lengths))]
    received = _received(
        index,
        redistribute(experience.batch, index, owners, group, token_advantages=advantages),
    )
    gathered: list[Any] = [None] * dist.get_world_size()
    answer = (received, experience.metrics)
    dist.gather_object(answer, gathered if dist.get_rank() == 0 else None, dst=0)
    parts = [part for part in gathered if part is not None]
    return [each for part, _ in parts for each in part], [metrics for _, metrics in parts]


def _received(index: StepIndex, sequences: Sequences) -> list[tuple[int, Received]]:
    assert sequences.token_advantages is not None
    found = []
    for number, tokens in sequences.tokens.items():
        start = sequences.offsets[number]
        own = sequences.token_advantages[start : start + index.response_lengths[number]]
        found.append(
            (
                number,
                Received(
                    dist.get_rank(),
                    tokens.tolist(),
                    index.groups[number],
                    float(index.rewards[number]),
                    own.tolist(),
                ),
            )
        )
    return found
