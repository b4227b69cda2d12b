"""The same loss, gradient norm, metrics and gradient of every parameter on every layout."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from gspo_megatron.config.parallel import Layout
from gspo_megatron.train.parity import Cut, StepResult, compare, first_update, synthetic_batch
from tests.parallel.models import VOCAB_SIZE, odd_moe
from tests.parallel.pool import Pool

# fp32 sums in another order; the gradients of the q/k norms, sums over all tokens that nearly
# cancel, come to 3e-6. A sequence, a shard or a factor gone wrong shows at 1e-2 and above.
GRADIENT_TOLERANCE = 2e-5
METRIC_TOLERANCE = 1e-5

# Four shares of two micro-batches and more: every layout below has at most 4 data ranks, and the
# routers' losses see the same micro-batches on all of them.
CUT = Cut(replicas=4, token_budget=40, multiple=2)

LAYOUTS = [
    "tp=2",
    "pp=2",
    "ep=2",
    "cp=2",
    "dp=2",
    "dp=2,ep=2",
    "tp=2,etp=2",
    "tp=2,cp=2",
    "pp=2,vpp=2",
    "pp=4",
    "cp=4",
    "tp=2,ep=4,dp=2",
    "tp=2,etp=2,ep=2,dp=2",
    "tp=2,pp=2,ep=2",
    "tp=2,pp=2,ep=2,cp=2",
    "pp=2,vpp=2,tp=2,ep=4,dp=2",
]
# where a sequence or the batch is cut, the token objectives have arithmetic of their own
TOKEN_LAYOUTS = ["cp=2", "dp=2,ep=2", "tp=2,pp=2,ep=2"]

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
            first_update,
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
    assert worst[1] <= GRADIENT_TOLERANCE, worst
    assert result.replica_error <= GRADIENT_TOLERANCE
    assert result.metrics.keys() == reference.metrics.keys()
    for name, value in reference.metrics.items():
        tolerance = METRIC_TOLERANCE
        if name.startswith("ratio/token/p"):
            tolerance = 0.04 * abs(value - 1)  # a bin of the sketch
        # figures that would be 0 but for rounding, such as kl/k1, have the size of the rounding
        assert result.metrics[name] == pytest.approx(value, rel=tolerance, abs=1e-8), name


def assert_norm_is_that_of_the_gradients(result: StepResult) -> None:
    """Megatron-Core sums squares over shards, and must count each element once."""
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in result.gradients.values()))
    assert result.metrics["grad_norm"] == pytest.approx(norm, rel=METRIC_TOLERANCE)


@pytest.mark.parametrize("objective", ["gspo", "gspo_token", "grpo"])
def test_batch_meets_both_clip_bounds_and_stays_inside_too(run: Run, objective: str) -> None:
    metrics = run("tp=1", objective).metrics
    assert metrics["clip/token/low"] > 0.02
    assert metrics["clip/token/high"] > 0.02
    assert metrics["clip/token/binding"] < 0.9
    # outside the range, but by the sign of the advantage not binding
    assert metrics["clip/token/outside"] > metrics["clip/token/binding"] + 0.02


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gspo_update_equals_that_of_one_rank(run: Run, layout: str) -> None:
    result = run(layout, "gspo")
    assert_same(result, run("tp=1", "gspo"))
    assert_norm_is_that_of_the_gradients(result)


@pytest.mark.parametrize("layout", TOKEN_LAYOUTS)
@pytest.mark.parametrize("objective", ["gspo_token", "grpo"])
def test_token_objectives_equal_those_of_one_rank(run: Run, objective: str, layout: str) -> None:
    assert_same(run(layout, objective), run("tp=1", objective))


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
