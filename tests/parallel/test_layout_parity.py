"""Models and layouts that the matrix of layouts does not contain: stages of different sizes, tied
embeddings, dense layers, padding."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from gspo_megatron.verify.parity import Cut
from gspo_megatron.verify.results import StepResult
from gspo_megatron.verify.synthetic import SyntheticBatch, synthetic_batch
from tests.parallel.models import VOCAB_SIZE, odd_moe
from tests.parallel.pool import Pool
from tests.parallel.updates import (
    FP32_TOLERANCE,
    assert_norm_is_that_of_the_gradients,
    assert_same_update,
    update,
)

Check = Callable[..., StepResult]


@pytest.fixture(scope="module")
def check(pool: Pool) -> Check:
    """A function that compares an update on a layout with the update on one rank. The update on one
    rank is cached. `more`: settings that only the run on the layout gets."""
    kept: dict[str, StepResult] = {}

    def run(layout: str, name: str, sequences: int, **model: Any) -> StepResult:
        config = odd_moe(layout, {"name": name}, **model)
        batch = synthetic_batch(config.objective, VOCAB_SIZE, num_sequences=sequences)
        return update(pool, config, batch=batch)

    def compare_with_one_rank(
        layout: str,
        name: str = "gspo",
        sequences: int = 13,
        more: dict[str, Any] | None = None,
        **model: Any,
    ) -> StepResult:
        key = f"{name} {sequences} {model}"
        if key not in kept:
            kept[key] = run("tp=1", name, sequences, **model)
        result = run(layout, name, sequences, **model, **(more or {}))
        assert_same_update(result, kept[key], FP32_TOLERANCE)
        assert_norm_is_that_of_the_gradients(result)
        return result

    return compare_with_one_rank


DENSE = {
    "num_moe_experts": None,
    "moe_layer_freq": 1,
    "moe_ffn_hidden_size": None,
    "moe_shared_expert_intermediate_size": None,
}
# Embedding and loss count as one layer each, so 4 layers take 3 + 3 places.
ENDS_COUNT = {
    "account_for_embedding_in_pipeline_split": True,
    "account_for_loss_in_pipeline_split": True,
}
# With these coefficients, most of a router's gradient comes from these losses. So an error with
# padding, or with unevenly distributed tokens, would be visible.
LARGE_ROUTER_LOSSES = {"moe_aux_loss_coeff": 1.0, "moe_z_loss_coeff": 0.1}


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        ("pp=4", {}),
        ("tp=2,ep=4,dp=2", {}),
        ("tp=2,etp=2,ep=2,dp=2", {}),
        ("pp=2,vpp=2,tp=2,ep=4,dp=2", {}),
        # The stages have different numbers of layers.
        ("pp=2", {"more": {"num_layers_in_first_pipeline_stage": 1}}),
        ("pp=2,cp=2", {"more": {"num_layers_in_last_pipeline_stage": 3}}),
        ("pp=2,tp=2", {"more": ENDS_COUNT}),
        ("pp=2", {"more": {"pipeline_model_parallel_layout": "Et|tttL"}}),
        ("pp=2,vpp=2,ep=2", {"more": {"pipeline_model_parallel_layout": "Et|t|tt|L"}}),
        ("tp=1", {"more": {"training": {"recompute": "selective"}}}),
        ("tp=2,cp=2", {"more": {"training": {"recompute": "selective"}}}),
        ("pp=2,vpp=2", {"more": {"training": {"recompute": "selective"}}}),
        ("tp=2", LARGE_ROUTER_LOSSES),
        ("cp=2", LARGE_ROUTER_LOSSES),
        ("pp=2", {"tie_embeddings": True}),
        ("tp=2,pp=2,ep=2", {"tie_embeddings": True}),
        ("tp=2", {"sequence_parallel": False, **DENSE}),
    ],
)
def test_the_update_is_that_of_one_rank(check: Check, layout: str, model: dict[str, Any]) -> None:
    check(layout, **model)


@pytest.mark.parametrize("layout", ["tp=2,cp=2", "dp=4", "dp=2,ep=2", "pp=2"])
def test_micro_batches_without_sequences_add_nothing(check: Check, layout: str) -> None:
    # Three sequences are divided over 4 shares of 2 micro-batches each, so most micro-batches
    # contain only padding.
    result = check(layout, "grpo", sequences=3)
    assert math.isfinite(result.metrics["grad_norm"])


@pytest.mark.parametrize("longest_first", [False, True])
@pytest.mark.parametrize("layout", ["dp=2", "pp=2,vpp=2,dp=2"])
def test_gradients_that_go_on_their_way_early_are_all_there(
    pool: Pool, layout: str, longest_first: bool
) -> None:
    """The second update has more micro-batches than the first one, or fewer."""
    results = []
    for overlap in (False, True):
        config = odd_moe(layout, {"name": "gspo"}, ddp={"overlap_grad_reduce": overlap})
        batch = synthetic_batch(config.objective, VOCAB_SIZE, num_sequences=16)
        order = sorted(range(16), key=lambda n: len(batch.tokens[n]), reverse=longest_first)
        columns = {
            name: column and [column[n] for n in order] for name, column in vars(batch).items()
        }
        cut = Cut(replicas=2, token_budget=25, multiple=2)
        result = update(pool, config, batch=SyntheticBatch(**columns), cut=cut, mini_batches=2)
        results.append(result)
    plain, overlapping = results  # the gradients of the second update
    assert_same_update(overlapping, plain, FP32_TOLERANCE)
