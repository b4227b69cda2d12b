"""Random micro-batches, and the objectives as the papers print them, in plain loops.

The reference shares no code with the package: one sequence and one token at a time, in float64.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from gspo_megatron.types import LossInputs


def _make_inputs(
    seed: int,
    lengths: tuple[int, ...] = (7, 1, 13, 4, 9, 2),
    *,
    spread: float = 1e-3,
    dtype: torch.dtype = torch.float64,
    with_token_advantages: bool = False,
) -> LossInputs:
    """Ragged sequences with holes in the mask, ratios to both sides of 1 and an advantage of 0.

    `spread` is the size of log pi - log pi_old, of which a part is common to a whole sequence so
    that the sequence ratios leave the clip range too.
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
        entropy=normal(tokens).abs().to(dtype),
        token_advantages=normal(tokens).to(dtype) if with_token_advantages else None,
    )


@dataclass
class Expected:
    loss: Tensor
    gradient: Tensor  # [tokens]
    binding: list[list[str]]  # per sequence, per masked token: "", "low" or "high"
    outside: list[list[bool]]


def _reference(name: str, inputs: LossInputs, clip_low: float, clip_high: float) -> Expected:
    new = inputs.logprobs.detach().double().requires_grad_()
    old = inputs.old_logprobs.double()
    loss = torch.zeros((), dtype=torch.float64)
    all_binding: list[list[str]] = []
    all_outside: list[list[bool]] = []
    for i in range(len(inputs.advantages)):
        positions = [
            t
            for t in range(len(new))
            if int(inputs.sequence_index[t]) == i and float(inputs.mask[t]) == 1.0
        ]
        binding: list[str] = []
        outside: list[bool] = []
        sequence_ratio = None
        if positions:
            log_sum = torch.zeros((), dtype=torch.float64)
            for t in positions:
                log_sum = log_sum + (new[t] - old[t])
            sequence_ratio = torch.exp(log_sum / len(positions))
        for t in positions:
            advantage = float(inputs.advantages[i])
            if inputs.token_advantages is not None:
                advantage = float(inputs.token_advantages[t])
            if name == "gspo":
                ratio = sequence_ratio
            elif name == "gspo_token":
                ratio = sequence_ratio.detach() * torch.exp(new[t]) / torch.exp(new[t]).detach()
            else:
                ratio = torch.exp(new[t]) / torch.exp(old[t])
            unclipped = ratio * advantage
            value = float(ratio.detach())
            clipped = min(max(value, 1 - clip_low), 1 + clip_high) * advantage
            cut = clipped < value * advantage
            surrogate = torch.tensor(clipped, dtype=torch.float64) if cut else unclipped
            loss = loss - surrogate / len(positions) / inputs.global_num_sequences
            binding.append("" if not cut else "low" if value < 1 else "high")
            outside.append(not 1 - clip_low <= value <= 1 + clip_high)
        all_binding.append(binding)
        all_outside.append(outside)
    (gradient,) = torch.autograd.grad(loss, new, allow_unused=True)
    return Expected(loss.detach(), gradient, all_binding, all_outside)


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

        mine = owner == shard
        cut = {
            name: getattr(inputs, name)[mine].detach()
            for name in ("logprobs", "old_logprobs", "mask", "sequence_index", "entropy")
        }
        if inputs.token_advantages is not None:
            cut["token_advantages"] = inputs.token_advantages[mine]
        cut["logprobs"].requires_grad_()
        return dataclasses.replace(
            inputs, **cut, sum_over_shards=sum_over_shards, is_primary_shard=shard == num_shards - 1
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
def reference() -> Callable[..., Expected]:
    return _reference


@pytest.fixture
def run_shards() -> Callable[..., list]:
    return _run_shards


# By name, the spread of log-ratios at which the default clip range binds for a part of them.
SPREADS = {"gspo": 1e-3, "gspo_token": 1e-3, "grpo": 0.4}


@pytest.fixture(params=sorted(SPREADS))
def name_and_spread(request: pytest.FixtureRequest) -> tuple[str, float]:
    return request.param, SPREADS[request.param]
