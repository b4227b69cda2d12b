"""Updates of cases, their references, and what it means that two are the same."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gspo_megatron.verify.parity import run_update
from gspo_megatron.verify.results import StepResult, compare
from gspo_megatron.verify.synthetic import SyntheticBatch
from tests.parallel.explicit import explicit_update
from tests.parallel.matrix import Case
from tests.parallel.models import VOCAB_SIZE
from tests.parallel.pool import Pool

# fp32 sums in another order; the gradients of the q/k norms, sums over all tokens that nearly
# cancel, come to 3e-6. A sequence, a shard or a factor gone wrong shows at 1e-2 and above.
FP32_TOLERANCE = 2e-5
# In float64 nothing but the order of sums is left: 5e-15 at most was seen.
FP64_TOLERANCE = 1e-10
# Megatron-Core's routers compute their softmax and their aux losses in float32 whatever the model's
# precision. The softmax rounds alike on every layout as long as the loss is scaled by the same
# number, or by a power of two; it is scaled by the number of micro-batches.
FP64_TOLERANCE_OF_ROUTERS = 5e-7
METRIC_TOLERANCE = 1e-5


def gradient_tolerance(case: Case) -> float:
    """Largest norm of the difference over the norm, for each parameter."""
    if case.precision == "fp32":
        return FP32_TOLERANCE
    return FP64_TOLERANCE_OF_ROUTERS if case.router_losses else FP64_TOLERANCE


class Updates:
    """Runs updates on the pool and keeps the references."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._explicit: dict[str, StepResult] = {}
        self._one_rank: dict[str, StepResult] = {}

    def run(self, case: Case, batch: SyntheticBatch | None = None) -> StepResult:
        """The case's update, by the code of a training step."""
        return self._pool.run(
            case.world_size,
            run_update,
            config=case.config(),
            vocab_size=VOCAB_SIZE,
            batch=batch or case.batch(),
            cut=case.cut(),
        )

    def explicit(self, case: Case, batch: SyntheticBatch | None = None) -> StepResult:
        """By the formulas, in float64; the same for all cases of an objective and a batch."""
        batch = batch or case.batch()
        key = f"{case.objective} {batch}"
        if key not in self._explicit:
            plain = replace(case.on_one_rank(), precision="fp64", router_losses=False)
            self._explicit[key] = self._pool.run(
                1, explicit_update, config=plain.config(), vocab_size=VOCAB_SIZE, batch=batch
            )
        return self._explicit[key]

    def one_rank(self, case: Case) -> StepResult:
        """On one rank with the same micro-batches."""
        plain = case.on_one_rank()
        cut = case.cut()
        key = f"{plain} {cut}"
        if key not in self._one_rank:
            self._one_rank[key] = self._pool.run(
                1,
                run_update,
                config=plain.config(),
                vocab_size=VOCAB_SIZE,
                batch=case.batch(),
                cut=cut,
            )
        return self._one_rank[key]

    def check(self, case: Case) -> None:
        """The update of `case` is right: its gradients and loss are those of the formulas where the
        routers add none of their own, else those of one rank, and its metrics those of one rank."""
        result, alone = self.run(case), self.one_rank(case)
        if not case.router_losses:
            assert_follows_formulas(case, result, self.explicit(case))
        assert_same_gradients(case, result, alone)
        assert_same_metrics(result, alone)
        assert_norm_is_that_of_the_gradients(result)


def assert_same_gradients(
    case: Case, result: StepResult, reference: StepResult, tolerance: float | None = None
) -> None:
    tolerance = tolerance or gradient_tolerance(case)
    name, error = compare(reference.gradients, result.gradients)[0]
    assert error <= tolerance, f"{case}: {name} is off by {error:.1e}"
    assert result.replica_error <= tolerance, f"{case}: replicas differ"


def assert_follows_formulas(
    case: Case, result: StepResult, explicit: StepResult, tolerance: float | None = None
) -> None:
    assert_same_gradients(case, result, explicit, tolerance)
    assert_close("loss", result, explicit, gradient_tolerance(case))


def assert_close(name: str, result: StepResult, reference: StepResult, tolerance: float) -> None:
    # fp32 losses are sums of terms of both signs: absolute errors have the size of the terms
    floor = 1e-7 if tolerance == FP32_TOLERANCE else 1e-12
    expected = pytest.approx(reference.metrics[name], rel=tolerance, abs=floor)
    assert result.metrics[name] == expected, name


def assert_same_metrics(result: StepResult, reference: StepResult) -> None:
    assert result.metrics.keys() == reference.metrics.keys()
    for name, value in reference.metrics.items():
        tolerance = METRIC_TOLERANCE
        if name.startswith("ratio/token/p"):
            tolerance = 0.04 * abs(value - 1)  # a bin of the sketch
        # figures that would be 0 but for rounding, such as kl/k1, have the size of the rounding
        assert result.metrics[name] == pytest.approx(value, rel=tolerance, abs=1e-8), name


def assert_norm_is_that_of_the_gradients(result: StepResult) -> None:
    """Megatron-Core sums squares over shards, and must count each element once."""
    total = sum(float(g.double().square().sum()) for g in result.gradients.values())
    assert result.metrics["grad_norm"] == pytest.approx(total**0.5, rel=METRIC_TOLERANCE)
