"""Updates on ranks, references for them, and the comparison of two updates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from gspo_megatron.checkpoint.start import load_initial_weights
from gspo_megatron.config import Config
from gspo_megatron.models.build import Policy
from gspo_megatron.models.reference import ReferencePolicy
from gspo_megatron.rl import policy_update
from gspo_megatron.verify import parity
from gspo_megatron.verify.parity import Cut, run_update
from gspo_megatron.verify.results import StepResult, compare
from gspo_megatron.verify.synthetic import SyntheticBatch, synthetic_batch
from tests.parallel.explicit import explicit_update
from tests.parallel.matrix import Case
from tests.parallel.models import VOCAB_SIZE
from tests.parallel.pool import Pool

# In fp32 results differ by rounding, because layouts add numbers in different orders. The gradients
# of q/k norms differ by 3e-6, because they are sums over all tokens whose terms nearly cancel. A
# wrong sequence, shard or factor gives a difference of 1e-2 or more.
FP32_TOLERANCE = 2e-5
# In float64, too, only the order of sums differs. The largest difference that we have seen was
# 5e-15.
FP64_TOLERANCE = 1e-10
# Megatron-Core's routers compute their softmax and aux losses in float32, whatever precision the
# model has. The softmax is rounded in the same way on all layouts if the scale of the loss is the
# same on all layouts, or is a power of two. This scale is the number of micro-batches.
FP64_TOLERANCE_OF_ROUTERS = 5e-7
METRIC_TOLERANCE = 1e-5

# A mini-batch is divided into four shares of two or more micro-batches each. A layout has at most 4
# data-parallel ranks, so the routers' losses get the same micro-batches on every layout.
CUT = Cut(replicas=4, token_budget=40, multiple=2)


def update(
    pool: Pool,
    config: Config,
    function: Callable[..., Any] = run_update,
    *,
    batch: SyntheticBatch | None = None,
    cut: Cut = CUT,
    vocab_size: int = VOCAB_SIZE,
    **arguments: Any,
) -> Any:
    """Make an update on all ranks of the configuration, with the code of a training step or with
    `function`."""
    batch = batch or synthetic_batch(config.objective, vocab_size)
    arguments |= {"vocab_size": vocab_size, "batch": batch, "cut": cut}
    return pool.on(config, function, **arguments)


class DistantReference(ReferencePolicy):
    """A reference far from the policy. The reference of a new run equals the policy, so the
    divergence and its gradient would be zero. Here each weight is changed by a function of itself,
    so the reference is the same on every layout."""

    @torch.no_grad()
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        for weight in self._weights:
            weight.add_(0.1 * torch.sin(37.0 * weight))


@mock.patch.object(policy_update, "ReferencePolicy", DistantReference)
def update_away_from_the_reference(**arguments: Any) -> StepResult:
    """Run `run_update`. If the configuration has a reference, it differs from the policy."""
    return run_update(**arguments)


def update_from_folder(**arguments: Any) -> StepResult:
    """Run `run_update` with the weights of model.hf_path and the settings of its config.json."""
    native = parity.build_policy

    def build_policy(config: Config, *others: Any) -> Policy:
        policy = native(config, *others)
        policy.set_padding_token(load_initial_weights(config, policy))
        return policy

    with mock.patch.object(parity, "build_policy", build_policy):
        return run_update(**arguments)


def gradient_tolerance(case: Case) -> float:
    """The largest allowed norm of the difference of a parameter's gradients, relative to the norm
    of the gradient."""
    if case.precision == "fp32":
        return FP32_TOLERANCE
    return FP64_TOLERANCE_OF_ROUTERS if case.router_losses else FP64_TOLERANCE


class Updates:
    """Runs the updates of cases on the pool, and keeps the results of references."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._kept: dict[str, StepResult] = {}

    def run(
        self,
        case: Case,
        batch: SyntheticBatch | None = None,
        function: Callable[..., StepResult] = run_update,
        **arguments: Any,
    ) -> StepResult:
        """Run the update of a case, with the code of a training step."""
        batch = batch or case.batch()
        return update(self._pool, case.config(), function, batch=batch, cut=case.cut(), **arguments)

    def explicit(self, case: Case, batch: SyntheticBatch | None = None) -> StepResult:
        """The update by the formulas, in float64. All cases with the same objective and batch share
        this result."""
        batch = batch or case.batch()
        key = f"{case.objective} {batch}"
        if key not in self._kept:
            plain = replace(case.on_one_rank(), precision="fp64", router_losses=False)
            self._kept[key] = self._pool.on(
                plain.config(), explicit_update, vocab_size=VOCAB_SIZE, batch=batch
            )
        return self._kept[key]

    def one_rank(self, case: Case) -> StepResult:
        """The update on one rank with the same micro-batches."""
        plain, cut = case.on_one_rank(), case.cut()
        key = f"{plain} {cut}"
        if key not in self._kept:
            self._kept[key] = update(self._pool, plain.config(), batch=case.batch(), cut=cut)
        return self._kept[key]

    def check(self, case: Case) -> None:
        """Check the update of `case`. Gradients and metrics must equal those on one rank. If the
        routers have no losses, the loss and the gradients must also equal the results of the
        formulas."""
        result = self.run(case)
        if not case.router_losses:
            assert_follows_formulas(case, result, self.explicit(case), gradient_tolerance(case))
        assert_same_update(result, self.one_rank(case), gradient_tolerance(case))
        assert_norm_is_that_of_the_gradients(result)


def assert_same_gradients(result: StepResult, reference: StepResult, tolerance: float) -> None:
    name, error = compare(reference.gradients, result.gradients)[0]
    assert error <= tolerance, f"{name} is off by {error:.1e}"
    assert result.replica_error <= tolerance, "replicas differ"


def assert_follows_formulas(
    case: Case, result: StepResult, explicit: StepResult, tolerance: float
) -> None:
    assert_same_gradients(result, explicit, tolerance)
    tolerance = gradient_tolerance(case)
    # A loss is a sum of terms of both signs. So its rounding error depends on the size of the
    # terms, which may be much larger than the loss.
    floor = 1e-7 if tolerance == FP32_TOLERANCE else 1e-12
    loss = explicit.metrics["loss"]
    assert result.metrics["loss"] == pytest.approx(loss, rel=tolerance, abs=floor)


def assert_same_update(
    result: StepResult, reference: StepResult, tolerance: float, *, but: str = ""
) -> None:
    """Check gradients and metrics. Of the metric `but`, check only that it is above 0 in both
    updates."""
    assert_same_gradients(result, reference, tolerance)
    assert result.metrics.keys() == reference.metrics.keys()
    for name, value in reference.metrics.items():
        tolerance = METRIC_TOLERANCE
        if name == but:
            assert min(value, result.metrics[name]) > 0
            continue
        if name.startswith("ratio/token/p"):
            tolerance = 0.04 * abs(value - 1)  # one bin of the sketch
        # A metric that would be 0 without rounding, such as kl/k1, has the size of the rounding
        # error.
        assert result.metrics[name] == pytest.approx(value, rel=tolerance, abs=1e-8), name


def assert_norm_is_that_of_the_gradients(result: StepResult) -> None:
    """Check that the gradient norm counts each element once. Megatron-Core computes it from sums of
    squares over shards."""
    total = sum(float(g.double().square().sum()) for g in result.gradients.values())
    assert result.metrics["grad_norm"] == pytest.approx(total**0.5, rel=METRIC_TOLERANCE)
