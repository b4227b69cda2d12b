"""Models and layouts beyond the matrix: other stages, tied embeddings, dense layers, padding."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from gspo_megatron.config.parallel import Layout
from gspo_megatron.verify.parity import Cut, run_update
from gspo_megatron.verify.results import StepResult, compare
from gspo_megatron.verify.synthetic import SyntheticBatch, synthetic_batch
from tests.parallel.models import VOCAB_SIZE, odd_moe
from tests.parallel.pool import Pool
from tests.parallel.updates import (
    FP32_TOLERANCE,
    assert_norm_is_that_of_the_gradients,
    assert_same_metrics,
)

# Four shares of two micro-batches and more: every layout below has at most 4 data ranks, and the
# routers' losses see the same micro-batches on all of them.
CUT = Cut(replicas=4, token_budget=40, multiple=2)

Run = Callable[..., StepResult]


@pytest.fixture(scope="module")
def run(pool: Pool) -> Run:
    """Updates of a case on a layout; those of one rank are kept as references."""
    kept: dict[str, StepResult] = {}

    def update(layout: str, objective: str, sequences: int = 13, **model: Any) -> StepResult:
        config = odd_moe(layout, {"name": objective}, **model)
        key = f"{layout} {objective} {sequences} {model}"
        if key in kept:
            return kept[key]
        result = pool.run(
            Layout.parse(layout).world_size,
            run_update,
            config=config,
            vocab_size=VOCAB_SIZE,
            batch=synthetic_batch(config.objective, VOCAB_SIZE, num_sequences=sequences),
            cut=CUT,
        )
        if layout == "tp=1":
            kept[key] = result
        return result

    return update


def assert_same(result: StepResult, reference: StepResult) -> None:
    worst = compare(reference.gradients, result.gradients)[0]
    assert worst[1] <= FP32_TOLERANCE, worst
    assert result.replica_error <= FP32_TOLERANCE
    assert_same_metrics(result, reference)
    assert_norm_is_that_of_the_gradients(result)


@pytest.mark.parametrize(
    "layout",
    ["pp=4", "tp=2,ep=4,dp=2", "tp=2,etp=2,ep=2,dp=2", "pp=2,vpp=2,tp=2,ep=4,dp=2"],
)
def test_larger_products_equal_one_rank(run: Run, layout: str) -> None:
    assert_same(run(layout, "gspo"), run("tp=1", "gspo"))


@pytest.mark.parametrize(
    ("layout", "stages"),
    [
        ("pp=2", {"num_layers_in_first_pipeline_stage": 1}),
        ("pp=2,cp=2", {"num_layers_in_last_pipeline_stage": 3}),
        # the embedding and the loss count as a layer each: 3 + 3 places for 4 layers
        (
            "pp=2,tp=2",
            {
                "account_for_embedding_in_pipeline_split": True,
                "account_for_loss_in_pipeline_split": True,
            },
        ),
        ("pp=2", {"pipeline_model_parallel_layout": "Et|tttL"}),
        ("pp=2,vpp=2,ep=2", {"pipeline_model_parallel_layout": "Et|t|tt|L"}),
    ],
)
def test_stages_of_unequal_size(run: Run, layout: str, stages: dict[str, Any]) -> None:
    assert_same(run(layout, "gspo", **stages), run("tp=1", "gspo"))


@pytest.mark.parametrize("layout", ["tp=1", "tp=2,cp=2", "pp=2,vpp=2"])
def test_selective_recompute(run: Run, layout: str) -> None:
    selective = run(layout, "gspo", training={"recompute": "selective"})
    assert_same(selective, run("tp=1", "gspo"))


@pytest.mark.parametrize("layout", ["tp=2,cp=2", "dp=4", "dp=2,ep=2", "pp=2"])
def test_micro_batches_without_sequences_add_nothing(run: Run, layout: str) -> None:
    # 3 sequences over 4 shares of 2 micro-batches: most of these are padding only
    result = run(layout, "grpo", sequences=3)
    assert_same(result, run("tp=1", "grpo", sequences=3))
    assert math.isfinite(result.metrics["grad_norm"])


@pytest.mark.parametrize("layout", ["tp=2", "cp=2"])
def test_losses_of_the_routers_are_means_over_real_tokens(run: Run, layout: str) -> None:
    """At these coefficients they are most of a router's gradient: padding that a layout adds, or
    tokens that it distributes unevenly, must not show."""
    losses = {"moe_aux_loss_coeff": 1.0, "moe_z_loss_coeff": 0.1}
    assert_same(run(layout, "gspo", **losses), run("tp=1", "gspo", **losses))


@pytest.mark.parametrize("layout", ["pp=2", "tp=2,pp=2,ep=2"])
def test_tied_embeddings_add_up_over_the_stages(run: Run, layout: str) -> None:
    assert_same(run(layout, "gspo", tie_embeddings=True), run("tp=1", "gspo", tie_embeddings=True))


def test_a_dense_model_without_sequence_parallelism(run: Run) -> None:
    dense = {
        "num_moe_experts": None,
        "moe_layer_freq": 1,
        "moe_ffn_hidden_size": None,
        "moe_shared_expert_intermediate_size": None,
        "sequence_parallel": False,
    }
    assert_same(run("tp=2", "gspo", **dense), run("tp=1", "gspo", **dense))


@pytest.mark.parametrize("longest_first", [False, True])
@pytest.mark.parametrize("layout", ["dp=2", "pp=2,vpp=2,dp=2"])
def test_gradients_that_go_on_their_way_early_are_all_there(
    pool: Pool, layout: str, longest_first: bool
) -> None:
    """The second update has more micro-batches than the first, or fewer."""
    results = []
    for overlap in (False, True):
        config = odd_moe(layout, {"name": "gspo"}, ddp={"overlap_grad_reduce": overlap})
        batch = synthetic_batch(config.objective, VOCAB_SIZE, num_sequences=16)
        order = sorted(range(16), key=lambda n: len(batch.tokens[n]), reverse=longest_first)
        columns = {
            name: column and [column[n] for n in order] for name, column in vars(batch).items()
        }
        result = pool.run(
            Layout.parse(layout).world_size,
            run_update,
            config=config,
            vocab_size=VOCAB_SIZE,
            batch=SyntheticBatch(**columns),
            cut=Cut(replicas=2, token_budget=25, multiple=2),
            mini_batches=2,
        )
        results.append(result)
    plain, overlapping = results
    worst = compare(plain.gradients, overlapping.gradients)[0]  # of the second update
    assert worst[1] <= FP32_TOLERANCE, worst
    assert_same_metrics(overlapping, plain)
