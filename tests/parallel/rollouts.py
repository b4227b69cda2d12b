"""What the ranks do in test_rollout_layouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from gspo_megatron.batching.micro_batches import MicroBatchBuilder, response_logprobs
from gspo_megatron.batching.plan import data_ranks, plan_step
from gspo_megatron.batching.redistribute import gather_index, redistribute
from gspo_megatron.config import Config, resolve_parallel
from gspo_megatron.models.build import Policy, build_policy
from gspo_megatron.platform.groups import set_up_model_parallel
from gspo_megatron.rollout.engine import Requests, Sampling
from gspo_megatron.rollout.megatron import MegatronEngine
from gspo_megatron.types import RolloutBatch
from tests.parallel.models import VOCAB_SIZE

PAD_ID, EOS_ID = 0, 2


def spelled(token_ids: Sequence[int]) -> str:
    """Each token is a character."""
    return "".join(map(chr, token_ids))


@dataclass
class Response:
    """One response, as one rank saw it."""

    rank: int
    data_rank: int
    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    truncated: bool


def generate(
    config: Config,
    prompts: list[list[int]],
    per_prompt: int,
    sampling: Sampling,
    seed: int,
    batch_size: int | None = None,
) -> list[tuple[int, Response]]:
    """All ranks' responses with their sample indices; data ranks take the prompts in turn."""
    policy = _policy(config)
    batch = _generate(policy, prompts, per_prompt, sampling, seed, batch_size)
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.gather_object(_responses(batch), gathered if dist.get_rank() == 0 else None, dst=0)
    return [response for part in gathered for response in part or ()]


def mismatch(
    config: Config, prompts: list[list[int]], per_prompt: int, sampling: Sampling, seed: int
) -> tuple[float, int]:
    """The largest difference between the engine's log-probs and those of the trainer's packed
    forward pass, and the number of tokens compared, over all ranks."""
    policy = _policy(config)
    batch = _generate(policy, prompts, per_prompt, sampling, seed)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    cp = config.parallel.context_parallel_size
    nothing = torch.zeros(len(batch.sample_index), dtype=torch.float64)
    index = gather_index(batch, nothing, group)
    plan = plan_step(
        index.lengths,
        index.response_lengths,
        mini_batches=1,
        data_parallel_size=parallel_state.get_data_parallel_world_size(),
        token_budget=60,
        micro_batch_multiple=config.parallel.pipeline_model_parallel_size,
    )[0]
    owners = data_ranks([plan], len(index.source))
    sequences = redistribute(batch, index, owners, group, context_parallel_size=cp)
    builder = MicroBatchBuilder(policy, PAD_ID, sampling.temperature)
    [micro_batches] = builder.build_step([plan], sequences, index)
    figures = torch.zeros(2, dtype=torch.float64)
    for micro_batch, (trained, _) in zip(micro_batches, response_logprobs(policy, micro_batches)):
        difference = (trained - micro_batch.rollout_logprobs).abs()
        if len(difference):
            figures[0] = max(figures[0], difference.max())
            figures[1] += len(difference)
    largest, count = figures.clone(), figures
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    dist.all_reduce(count)
    # every TP rank of the last stage has counted
    return float(largest[0]), int(count[1]) // config.parallel.tensor_model_parallel_size


def argmaxes(config: Config, sequences: list[list[int]]) -> list[list[int]]:
    """The most likely token after each position: one forward pass a sequence, without a cache."""
    policy = _policy(config)
    policy.eval()
    model = policy.models[0]
    results = []
    with torch.no_grad():
        for sequence in sequences:
            ids = torch.tensor([sequence])
            positions = torch.arange(len(sequence))[None]
            hidden = model(input_ids=ids, position_ids=positions, attention_mask=None)
            results.append(model.next_token_logits(hidden[0]).argmax(dim=-1).tolist())
    return results


def _policy(config: Config) -> Policy:
    parallel = resolve_parallel(config, dist.get_world_size())
    set_up_model_parallel(parallel, config.training.seed)
    return build_policy(config, parallel, VOCAB_SIZE)


def _generate(
    policy: Policy,
    prompts: list[list[int]],
    per_prompt: int,
    sampling: Sampling,
    seed: int,
    batch_size: int | None = None,
) -> RolloutBatch:
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    numbers = range(group.rank(), len(prompts), group.size())
    engine = MegatronEngine(
        policy, pad_id=PAD_ID, eos_id=EOS_ID, batch_size=batch_size, decode=spelled
    )
    requests = Requests([prompts[n] for n in numbers], list(numbers), per_prompt)
    return engine.generate(requests, sampling, seed)


def _responses(batch: RolloutBatch) -> list[tuple[int, Response]]:
    rank = dist.get_rank()
    data_rank = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    prompt_lengths, lengths = batch.prompt_lengths.tolist(), batch.response_lengths.tolist()
    tokens = batch.tokens.split([p + r for p, r in zip(prompt_lengths, lengths)])
    logprobs = batch.rollout_logprobs.split(lengths)
    return [
        (
            sample,
            Response(
                rank,
                data_rank,
                tokens[row][: prompt_lengths[row]].tolist(),
                tokens[row][prompt_lengths[row] :].tolist(),
                logprobs[row].tolist(),
                truncated,
            ),
        )
        for row, (sample, truncated) in enumerate(
            zip(batch.sample_index.tolist(), batch.truncated.tolist())
        )
    ]
