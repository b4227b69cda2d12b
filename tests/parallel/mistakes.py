"""Deliberate mistakes, each as a patch of the code under test: the matrix has to notice them all.

They run in the workers of the pool, as `mistaken_update`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter

from gspo_megatron.batching import micro_batches as schedule
from gspo_megatron.batching.plan import MiniBatch
from gspo_megatron.models import build, experts, logprob_head
from gspo_megatron.rl import policy_update as step
from gspo_megatron.verify import parity
from gspo_megatron.verify.parity import run_update
from gspo_megatron.verify.results import StepResult

Mistake = Callable[[], contextlib.AbstractContextManager]
MISTAKES: dict[str, Mistake] = {}


def mistaken_update(mistake: str, **arguments: Any) -> StepResult:
    """`run_update` with one mistake in it."""
    with MISTAKES[mistake]():
        return run_update(**arguments)


def _mistake(function: Callable[[], Iterator[None]]) -> Callable[[], Iterator[None]]:
    MISTAKES[function.__name__] = contextlib.contextmanager(function)
    return function


@_mistake
def sequence_sums_not_reduced_over_cp() -> Iterator[None]:
    with mock.patch.object(step.PolicyUpdater, "sum_over_shards", lambda _, values: values):
        yield


@_mistake
def mean_of_micro_batch_means() -> Iterator[None]:
    native = step.LossInputs
    micro_batches = 8  # of the uneven cut

    def inputs(**fields: Any) -> Any:
        return native(
            **fields | {"global_num_sequences": len(fields["advantages"]) * micro_batches}
        )

    with mock.patch.object(step, "LossInputs", inputs):
        yield


@_mistake
def divisor_of_one_data_rank() -> Iterator[None]:
    own = property(lambda plan: sum(map(bool, plan.micro_batches[0])))
    with mock.patch.object(MiniBatch, "num_micro_batches", own):
        yield


@_mistake
def aux_loss_scaled_by_tokens_of_the_shard() -> Iterator[None]:
    """As stock Megatron-Core has it. Our z loss refuses that scale, so it keeps its own."""
    native = TopKRouter.apply_z_loss

    def apply_z_loss(self: TopKRouter, *args: Any, **kwargs: Any) -> Any:
        self.calculate_per_token_loss = False
        try:
            return native(self, *args, **kwargs)
        finally:
            self.calculate_per_token_loss = True

    with (
        mock.patch.object(build, "_aux_losses_count_micro_batches"),
        mock.patch.object(TopKRouter, "apply_z_loss", apply_z_loss),
    ):
        yield


@_mistake
def shift_off_by_one() -> Iterator[None]:
    native = schedule.pack

    def pack(*args: Any, **kwargs: Any) -> Any:
        packed = native(*args, **kwargs)
        last = packed.input_ids.numel() - 1
        return dataclasses.replace(packed, token_rows=(packed.token_rows + 1).clamp(max=last))

    with mock.patch.object(schedule, "pack", pack):
        yield


@_mistake
def padding_mask_ignored() -> Iterator[None]:
    with mock.patch.object(schedule, "_local_padding_mask", return_value=None):
        yield


@_mistake
def sequence_index_of_the_packed_batch_lost() -> Iterator[None]:
    native = schedule.pack

    def pack(*args: Any, **kwargs: Any) -> Any:
        packed = native(*args, **kwargs)
        return dataclasses.replace(packed, sequence_index=torch.zeros_like(packed.sequence_index))

    with mock.patch.object(schedule, "pack", pack):
        yield


@_mistake
def softmax_maximum_not_reduced_over_tp() -> Iterator[None]:
    native = logprob_head._row_maximum
    with mock.patch.object(
        logprob_head, "_row_maximum", lambda logits, group: native(logits, None)
    ):
        yield


@_mistake
def virtual_stages_swapped() -> Iterator[None]:
    """The last pipeline rank runs its first chunk's layer where its second one's belongs."""
    native = parity.build_policy

    def build_policy(*args: Any) -> Any:
        policy = native(*args)
        if parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            first, second = (model.decoder.layers.parameters() for model in policy.models)
            for one, other in zip(first, second, strict=True):
                kept = one.detach().clone()
                one.data.copy_(other.data)
                other.data.copy_(kept)
        return policy

    with mock.patch.object(parity, "build_policy", build_policy):
        yield


@_mistake
def expert_gradients_reduced_over_the_wrong_ranks() -> Iterator[None]:
    """The experts of TP2 with ETP1 are copies on the two TP ranks, which see different tokens."""
    native = experts.GroupedExperts.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        native(self, *args, **kwargs)
        self.weight1.allreduce = self.weight2.allreduce = True

    with mock.patch.object(experts.GroupedExperts, "__init__", init):
        yield
