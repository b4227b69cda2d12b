"""What the ranks do in test_redistribute."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from gspo_megatron.batching.redistribute import gather_index, redistribute
from gspo_megatron.config import Config, resolve_parallel
from gspo_megatron.platform.groups import set_up_model_parallel
from gspo_megatron.types import RolloutBatch


def sequence(seed: int, number: int) -> tuple[list[int], list[float], float]:
    """Tokens, the response's log-probs and the reward of a sequence, as any rank knows them."""
    draw = random.Random(f"{seed} {number}")
    length = draw.randint(2, 30)
    response = draw.randint(1, length - 1)
    tokens = [draw.randrange(1000) for _ in range(length)]
    # multiples of 1/64 are exact in float32
    logprobs = [-draw.randrange(1000) / 64 for _ in range(response)]
    return tokens, logprobs, draw.randrange(-200, 200) / 64


def move(
    config: Config, seed: int, sources: list[int], destinations: list[int]
) -> list[dict[str, Any]]:
    """Send sequence n from data rank sources[n] to the data-parallel rank destinations[n]. Returns
    what each rank received."""
    set_up_model_parallel(resolve_parallel(config, dist.get_world_size()), 1)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    cp = config.parallel.context_parallel_size
    mine = [n for n, source in enumerate(sources) if source == group.rank()]
    random.Random(seed).shuffle(mine)  # an engine may return them in any order
    batch, rewards = _batch(seed, mine)
    index = gather_index(batch, rewards, group)
    # token advantages travel as the log-probs do: twice them, so that nothing else passes for them
    received = redistribute(
        batch,
        index,
        destinations,
        group,
        context_parallel_size=cp,
        token_advantages=2 * batch.rollout_logprobs,
    )
    assert torch.equal(received.token_advantages, 2 * received.rollout_logprobs)
    for number, tokens in received.tokens.items():
        assert torch.equal(received.routes[number], _routes(tokens))
    result = {
        "data_parallel_rank": parallel_state.get_data_parallel_rank(),
        "source": list(index.source),
        "lengths": list(index.lengths),
        "tokens": {n: tokens.tolist() for n, tokens in received.tokens.items()},
        "logprobs": {
            n: received.rollout_logprobs[start : start + index.response_lengths[n]].tolist()
            for n, start in received.offsets.items()
        },
        "rewards": index.rewards.tolist(),
        "groups": list(index.groups),
        "num_logprobs": len(received.rollout_logprobs),
    }
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.gather_object(result, gathered if dist.get_rank() == 0 else None, dst=0)
    return gathered


def _routes(tokens: torch.Tensor) -> torch.Tensor:
    """[tokens, 3 layers, 2 experts] of a model with more than 256 experts."""
    return (tokens[:, None, None] + torch.arange(6).view(3, 2)).to(torch.int16)


def _batch(seed: int, numbers: list[int]) -> tuple[RolloutBatch, torch.Tensor]:
    contents = [sequence(seed, n) for n in numbers]
    responses = torch.tensor([len(p) for _, p, _ in contents], dtype=torch.long)
    lengths = torch.tensor([len(t) for t, _, _ in contents], dtype=torch.long)
    tokens = torch.tensor([x for t, _, _ in contents for x in t], dtype=torch.long)
    batch = RolloutBatch(
        tokens=tokens,
        prompt_lengths=lengths - responses,
        response_lengths=responses,
        rollout_logprobs=torch.tensor([x for _, p, _ in contents for x in p], dtype=torch.float32),
        truncated=torch.zeros(len(numbers), dtype=torch.bool),
        sample_index=torch.tensor(numbers, dtype=torch.long),
        group_index=torch.tensor(numbers, dtype=torch.long) // 2,
        routes=_routes(tokens),
    )
    return batch, torch.tensor([r for _, _, r in contents], dtype=torch.float64)
