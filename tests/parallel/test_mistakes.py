"""Ten mistakes, planted one at a time. The comparison of the layout matrix notices each of them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter

from gspo_megatron.batching import micro_batches as schedule
from gspo_megatron.batching.plan import MiniBatch
from gspo_megatron.models import build, logprob_head
from gspo_megatron.rl import policy_update as step
from gspo_megatron.verify import parity
from gspo_megatron.verify.results import StepResult, compare
from tests.parallel.matrix import Case
from tests.parallel.updates import FP32_TOLERANCE, Updates

Mistake = Callable[[], contextlib.AbstractContextManager]
# By name: a case that notices the mistake, and a patch of the code under test. A case without the
# routers' losses is compared with the formulas. So it also notices a mistake that is the same on
# all layouts.
MISTAKES: dict[str, tuple[Case, Mistake]] = {}


def mistake(*case: str, **options: Any) -> Callable[[Mistake], Mistake]:
    def enter(function: Mistake) -> Mistake:
        MISTAKES[function.__name__] = Case(*case, **options), function
        return function

    return enter


def mistaken_update(mistake: str, **arguments: Any) -> StepResult:
    """Run `run_update` with one mistake."""
    with MISTAKES[mistake][1]():
        return parity.run_update(**arguments)


def patched_pack(**changes: Callable[[Any], torch.Tensor]) -> contextlib.AbstractContextManager:
    """Change the named fields of packed batches. Each function takes the packed batch and returns
    the new value."""
    native = schedule.pack

    def pack(*args: Any, **kwargs: Any) -> Any:
        packed = native(*args, **kwargs)
        return dataclasses.replace(packed, **{k: change(packed) for k, change in changes.items()})

    return patch.object(schedule, "pack", pack)


@mistake("cp=2")
def sequence_sums_not_reduced_over_cp() -> contextlib.AbstractContextManager:
    return patch.object(step.PolicyUpdater, "sum_over_shards", lambda _, values: values)


@mistake("tp=1")
def mean_of_micro_batch_means() -> contextlib.AbstractContextManager:
    native = step.LossInputs
    micro_batches = 8  # the number of micro-batches in the uneven split

    def inputs(**fields: Any) -> Any:
        count = len(fields["advantages"]) * micro_batches
        return native(**fields | {"global_num_sequences": count})

    return patch.object(step, "LossInputs", inputs)


@mistake("dp=2", router_losses=True)
def divisor_of_one_data_rank() -> contextlib.AbstractContextManager:
    own = property(lambda plan: sum(map(bool, plan.micro_batches[0])))
    return patch.object(MiniBatch, "num_micro_batches", own)


@mistake("tp=2", router_losses=True)
def aux_loss_scaled_by_tokens_of_the_shard() -> contextlib.AbstractContextManager:
    """The aux loss is scaled as in stock Megatron-Core. The z loss keeps our scale, because our
    code refuses the stock scale."""
    native = TopKRouter.apply_z_loss

    def apply_z_loss(self: TopKRouter, *args: Any, **kwargs: Any) -> Any:
        with patch.object(self, "calculate_per_token_loss", False):
            return native(self, *args, **kwargs)

    patches = contextlib.ExitStack()
    patches.enter_context(patch.object(build, "_aux_losses_count_micro_batches"))
    patches.enter_context(patch.object(TopKRouter, "apply_z_loss", apply_z_loss))
    return patches


@mistake("tp=1")
def shift_off_by_one() -> contextlib.AbstractContextManager:
    return patched_pack(
        token_rows=lambda packed: (packed.token_rows + 1).clamp(max=packed.input_ids.numel() - 1)
    )


@mistake("tp=2", packing=False, router_losses=True)
def padding_mask_ignored() -> contextlib.AbstractContextManager:
    return patch.object(schedule, "_local_padding_mask", return_value=None)


@mistake("tp=1")
def sequence_index_of_the_packed_batch_lost() -> contextlib.AbstractContextManager:
    return patched_pack(sequence_index=lambda packed: torch.zeros_like(packed.sequence_index))


@mistake("tp=2")
def softmax_maximum_not_reduced_over_tp() -> contextlib.AbstractContextManager:
    native = logprob_head.row_maximum
    return patch.object(logprob_head, "row_maximum", lambda logits, group: native(logits, None))


@mistake("pp=2,vpp=2")
def virtual_stages_swapped() -> contextlib.AbstractContextManager:
    """The last pipeline rank exchanges the parameters of its first and its second chunk."""
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

    return patch.object(parity, "build_policy", build_policy)


@mistake("tp=2")
def expert_gradients_reduced_over_the_wrong_ranks() -> contextlib.AbstractContextManager:
    """With TP2 and ETP1, both TP ranks have copies of the experts, but different tokens."""
    return patch.object(build, "_reduce_experts_over_their_replicas", lambda *_: None)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_shows_in_the_gradients(updates: Updates, mistake: str) -> None:
    case, _ = MISTAKES[mistake]
    reference = updates.one_rank(case) if case.router_losses else updates.explicit(case)
    right = compare(reference.gradients, updates.run(case).gradients)
    assert right[0][1] <= FP32_TOLERANCE
    wrong = updates.run(case, function=mistaken_update, mistake=mistake)
    name, error = compare(reference.gradients, wrong.gradients)[0]
    print(f"{mistake}: {case}: {name} off by {error:.1e}")
    assert error > 50 * FP32_TOLERANCE
