"""Random micro-batches, their parts on several ranks, and objectives by name."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from gspo_megatron.config.schema import ObjectiveSection
from gspo_megatron.objectives import Objective, build_objective
from gspo_megatron.types import LossInputs, LossOutputs
from tests.unit.objectives.papers import LONGEST, PAPERS

EVERY_OBJECTIVE = pytest.mark.parametrize("name", list(PAPERS))
# Both sides compute in float64, so only the order of additions differs.
EXACT = {"rtol": 1e-10, "atol": 1e-13}
# The vectors with a value for each token. The number is the sign of the values outside the mask.
OF_TOKENS = {"logprobs": 1, "old_logprobs": -1, "mask": 0, "sequence_index": 0, "entropy": 1,
             "token_advantages": 1, "rollout_logprobs": 1, "reference_logprobs": -1}  # fmt: skip


def make_objective(name: str, **keys: Any) -> Objective:
    """An objective by its name and the keys of its section."""
    return build_objective(ObjectiveSection(name=name, **keys), max_response_tokens=LONGEST)


def make_inputs(
    seed: int,
    lengths: tuple[int, ...] = (7, 1, 13, 4, 9, 2),
    *,
    spread: float = 1e-3,
    mismatch: float = 0.1,
    dtype: torch.dtype = torch.float64,
    with_token_advantages: bool = False,
    with_reference: bool = False,
) -> LossInputs:
    """Ragged sequences with holes in the mask, ratios on both sides of 1, and one advantage of 0.

    `spread` is the size of log pi - log pi_old. A part of it is common to a whole sequence, so that
    sequence ratios leave the clip range, too. `mismatch` is the size of log pi_old - log
    pi_rollout.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    tokens, sequences = sum(lengths), len(lengths)
    index = torch.repeat_interleave(torch.arange(sequences), torch.tensor(lengths))
    mask = (torch.rand(tokens, generator=generator) > 0.25).to(dtype)
    mask[(torch.tensor(lengths).cumsum(0) - 1)] = 1  # every sequence has a token inside the mask
    old = -normal(tokens).abs() - 0.1
    # log-probs are below 0
    new = (old + spread * (normal(tokens) + normal(sequences)[index])).clamp(max=-0.01)
    advantages = normal(sequences)
    advantages[sequences // 2] = 0.0
    lengths_in_mask = torch.zeros(sequences, dtype=dtype).index_add(0, index, mask)
    entropy = normal(tokens).abs().to(dtype)
    token_advantages = normal(tokens).to(dtype) if with_token_advantages else None
    rollout = (old - mismatch * (normal(tokens) + normal(sequences)[index])).clamp(max=-0.01)
    reference = (new + 0.3 * normal(tokens)).to(dtype) if with_reference else None
    return LossInputs(
        logprobs=new.to(dtype).requires_grad_(),
        old_logprobs=old.to(dtype),
        mask=mask,
        sequence_index=index,
        advantages=advantages.to(dtype),
        sequence_lengths=lengths_in_mask,
        # the mini-batch has five more sequences, on other ranks or in other micro-batches
        global_num_sequences=sequences + 5,
        global_num_tokens=int(mask.sum()) + 40,
        sum_over_shards=lambda vector: vector,
        is_primary_shard=True,
        entropy=entropy.requires_grad_(),
        token_advantages=token_advantages,
        rollout_logprobs=rollout.to(dtype),
        reference_logprobs=reference,
    )


def inputs_of(name: str, seed: int, **options: Any) -> LossInputs:
    """The inputs of `make_inputs`, with a spread at which the clip of objective `name` binds for
    some tokens."""
    return make_inputs(seed, spread=PAPERS[name].spread, **options)


def as_mini_batch(inputs: LossInputs) -> LossInputs:
    """The same inputs, as the only micro-batch of a mini-batch."""
    inputs.global_num_sequences = len(inputs.advantages)
    inputs.global_num_tokens = int(inputs.mask.sum())
    return inputs


def without_tokens(inputs: LossInputs, sequence: int) -> LossInputs:
    """The same inputs, with all tokens of one sequence outside the mask."""
    inputs.mask[inputs.sequence_index == sequence] = 0
    inputs.sequence_lengths[sequence] = 0
    return inputs


def poisoned(inputs: LossInputs, value: float) -> LossInputs:
    """The same inputs, with `value` wherever the mask is 0."""
    holes = inputs.mask == 0
    changed = {
        name: getattr(inputs, name).detach().masked_fill(holes, sign * value)
        for name, sign in OF_TOKENS.items()
        if sign and getattr(inputs, name) is not None
    }
    return _leaves(dataclasses.replace(inputs, **changed))


def choose(inputs: LossInputs, which: Tensor, **others: Any) -> LossInputs:
    """The same inputs, but only the tokens that `which` selects (a mask, or indices in another
    order). The tensors are leaves of a new graph."""
    tensors = {name: getattr(inputs, name) for name in OF_TOKENS}
    cut = {name: t[which].detach().clone() for name, t in tensors.items() if t is not None}
    return _leaves(dataclasses.replace(inputs, **(cut | others)))


def _leaves(inputs: LossInputs) -> LossInputs:
    inputs.logprobs.requires_grad_()
    if inputs.entropy is not None:
        inputs.entropy.requires_grad_()
    return inputs


def micro_batch(inputs: LossInputs, first: int, last: int) -> LossInputs:
    """The sequences from `first` to `last` - 1 of a mini-batch."""
    part = choose(
        inputs,
        (inputs.sequence_index >= first) & (inputs.sequence_index < last),
        advantages=inputs.advantages[first:last],
        sequence_lengths=inputs.sequence_lengths[first:last],
    )
    part.sequence_index -= first
    return part


def owners(kind: str, tokens: int, num_shards: int) -> Tensor:
    """The shard of each token."""
    # Context parallelism with n ranks gives chunks i and 2n-1-i of a sequence to rank i.
    if kind == "zigzag":
        chunk = torch.arange(tokens) * 2 * num_shards // tokens
        return torch.minimum(chunk, 2 * num_shards - 1 - chunk)
    if kind == "random":
        generator = torch.Generator().manual_seed(num_shards)
        return torch.randint(num_shards, (tokens,), generator=generator)
    # The last shard has all tokens.
    return torch.full((tokens,), num_shards - 1)


def run_shards(
    inputs: LossInputs, owner: Tensor, function: Callable[[LossInputs], LossOutputs]
) -> list[tuple[LossInputs, LossOutputs]]:
    """Call `function` on every shard at the same time, as the ranks of context parallelism would.

    `owner` [tokens] is the shard of each token. The shards are threads that wait for each other in
    `sum_over_shards`, so a skipped collective is noticed.
    """
    num_shards = int(owner.max()) + 1
    barrier = threading.Barrier(num_shards, timeout=60)
    posted: list[Tensor | None] = [None] * num_shards

    def shard_inputs(shard: int) -> LossInputs:
        def sum_over_shards(vector: Tensor) -> Tensor:
            assert not vector.requires_grad
            posted[shard] = vector.clone()
            barrier.wait()
            total = torch.stack(posted).sum(0)
            barrier.wait()
            return vector.copy_(total)  # in place, like an all-reduce

        return choose(
            inputs,
            owner == shard,
            sum_over_shards=sum_over_shards,
            is_primary_shard=shard == num_shards - 1,
        )

    def work(shard: int) -> tuple[LossInputs, LossOutputs]:
        try:
            mine = shard_inputs(shard)
            return mine, function(mine)
        except BaseException:
            barrier.abort()  # otherwise the other shards would wait forever
            raise

    with ThreadPoolExecutor(num_shards) as pool:
        futures = [pool.submit(work, shard) for shard in range(num_shards)]
    errors = [error for error in (future.exception() for future in futures) if error is not None]
    # If a shard fails, the other shards get BrokenBarrierError. The real error comes first in this
    # order.
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return [future.result() for future in futures]
