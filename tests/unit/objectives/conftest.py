"""Random micro-batches, cut into shards or not, and objectives by name."""

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
from gspo_megatron.types import LossInputs
from tests.unit.objectives.papers import SPREADS

PER_TOKEN = (
    "logprobs",
    "old_logprobs",
    "mask",
    "sequence_index",
    "entropy",
    "token_advantages",
    "rollout_logprobs",
    "reference_logprobs",
)


def _make_objective(name: str, **keys: Any) -> Objective:
    return build_objective(ObjectiveSection(name=name, **keys), max_response_tokens=40)


def _make_inputs(
    seed: int,
    lengths: tuple[int, ...] = (7, 1, 13, 4, 9, 2),
    *,
    spread: float = 1e-3,
    mismatch: float = 0.1,
    dtype: torch.dtype = torch.float64,
    with_token_advantages: bool = False,
    with_reference: bool = False,
) -> LossInputs:
    """Ragged sequences with holes in the mask, ratios to both sides of 1 and an advantage of 0.

    `spread` is the size of log pi - log pi_old, of which a part is common to a whole sequence so
    that the sequence ratios leave the clip range too; `mismatch` that of log pi_old - log mu.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    tokens, sequences = sum(lengths), len(lengths)
    index = torch.repeat_interleave(torch.arange(sequences), torch.tensor(lengths))
    mask = (torch.rand(tokens, generator=generator) > 0.25).to(dtype)
    mask[(torch.tensor(lengths).cumsum(0) - 1)] = 1  # no sequence is empty
    old = -normal(tokens).abs() - 0.1
    new = old + spread * (normal(tokens) + normal(sequences)[index])
    advantages = normal(sequences)
    advantages[sequences // 2] = 0.0
    lengths_in_mask = torch.zeros(sequences, dtype=dtype).index_add(0, index, mask)
    entropy = normal(tokens).abs().to(dtype)
    token_advantages = normal(tokens).to(dtype) if with_token_advantages else None
    sampled = old - mismatch * (normal(tokens) + normal(sequences)[index])
    reference = (new + 0.3 * normal(tokens)).to(dtype) if with_reference else None
    return LossInputs(
        logprobs=new.to(dtype).requires_grad_(),
        old_logprobs=old.to(dtype),
        mask=mask,
        sequence_index=index,
        advantages=advantages.to(dtype),
        sequence_lengths=lengths_in_mask,
        global_num_sequences=sequences + 5,  # other micro-batches and ranks hold five more
        global_num_tokens=int(mask.sum()) + 40,
        sum_over_shards=lambda vector: vector,
        is_primary_shard=True,
        entropy=entropy.requires_grad_(),
        token_advantages=token_advantages,
        rollout_logprobs=sampled.to(dtype),
        reference_logprobs=reference,
    )


def _choose(inputs: LossInputs, which: Tensor, **others: Any) -> LossInputs:
    """The same with the tokens `which` alone (a mask or an order), as leaves of a new graph."""
    cut = {}
    for name in PER_TOKEN:
        tensor = getattr(inputs, name)
        if tensor is not None:
            cut[name] = tensor[which].detach().clone()
    cut["logprobs"].requires_grad_()
    if "entropy" in cut:
        cut["entropy"].requires_grad_()
    return dataclasses.replace(inputs, **(cut | others))


def _run_shards(
    inputs: LossInputs, owner: Tensor, function: Callable[[LossInputs], object]
) -> list[tuple[LossInputs, object]]:
    """Call `function` on every shard at the same time, as ranks of context parallelism would.

    `owner` [tokens] is the shard that holds each token. The shards are threads that really wait for
    each other in `sum_over_shards`, so one that skips a collective is found out.
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
            return vector.copy_(total)  # in place, as an all-reduce does it

        return _choose(
            inputs,
            owner == shard,
            sum_over_shards=sum_over_shards,
            is_primary_shard=shard == num_shards - 1,
        )

    def work(shard: int) -> tuple[LossInputs, object]:
        finished = False
        try:
            mine = shard_inputs(shard)
            result = mine, function(mine)
            finished = True
            return result
        finally:
            if not finished:
                barrier.abort()  # do not leave the others waiting

    with ThreadPoolExecutor(num_shards) as pool:
        futures = [pool.submit(work, shard) for shard in range(num_shards)]
    errors = [error for error in (future.exception() for future in futures) if error is not None]
    # A shard that failed breaks the barrier of the others: its own error is the one to show.
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return [future.result() for future in futures]


@pytest.fixture
def make_inputs() -> Callable[..., LossInputs]:
    return _make_inputs


@pytest.fixture
def make_objective() -> Callable[..., Objective]:
    """An objective by name and the keys of its section; 40 response tokens at most."""
    return _make_objective


@pytest.fixture
def choose() -> Callable[..., LossInputs]:
    return _choose


@pytest.fixture
def run_shards() -> Callable[..., list]:
    return _run_shards


@pytest.fixture(params=list(SPREADS))
def name_and_spread(request: pytest.FixtureRequest) -> tuple[str, float]:
    return request.param, SPREADS[request.param]
