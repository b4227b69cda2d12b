"""Loss, gradients, learning and resuming on a GPU, in every precision that the GPU supports,
compared with fp32 on the CPU. The tests without the mark `gpu` use only the CPU."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from gspo_megatron.config.precision import FP8
from tests.gpu.conftest import Task, need

ENGINE = "transformer_engine"
# The allowed error relative to the whole gradient, which passes through two layers. bf16 keeps 8
# bits, e4m3 keeps 4, and e5m2 keeps 3.
TOLERANCE = {"fp32": 1e-3, "bf16": 0.05, **dict.fromkeys(FP8, 0.3)}
# allowed difference of log-probs, in nats
MISMATCH = {"fp32": 1e-3, "bf16": 0.05, **dict.fromkeys(FP8, 0.2)}
ON_A_GPU = [
    ("fp32", "torch_native"),
    ("bf16", "torch_native"),
    ("bf16", ENGINE),
    *((precision, ENGINE) for precision in FP8),
]


def distance(gradients: dict[str, Tensor], reference: dict[str, Tensor]) -> float:
    """||difference|| / ||reference|| over all parameters together."""
    assert gradients.keys() == reference.keys()
    joined = [torch.cat([t[name].flatten() for name in reference]) for t in (gradients, reference)]
    assert joined[0].isfinite().all()
    return float((joined[0] - joined[1]).norm() / joined[1].norm())


def check_step(task: Task, precision: str, backend: str, *, cpu: bool = False) -> None:
    reference = task("step", "fp32", cpu=True)
    found = task("step", precision, backend, cpu=cpu)
    tolerance = TOLERANCE[precision]
    assert math.isclose(found["loss"], reference["loss"], rel_tol=tolerance)
    assert distance(found["gradients"], reference["gradients"]) < tolerance
    assert found["mismatch"] < MISMATCH[precision]
    dtypes = found["dtypes"]
    low = torch.float32 if precision == "fp32" else torch.bfloat16
    assert dtypes["weights"] == dtypes["experts"] == {low}
    assert dtypes["router"] == dtypes["head"] == dtypes["gradients"] == {torch.float32}


def test_bf16_on_the_cpu(task: Task) -> None:
    check_step(task, "bf16", "torch_native", cpu=True)


@pytest.mark.gpu
@pytest.mark.parametrize(("precision", "backend"), ON_A_GPU)
def test_loss_and_gradients_are_those_of_fp32_on_the_cpu(
    task: Task, precision: str, backend: str
) -> None:
    need(precision, engine=backend == ENGINE)
    check_step(task, precision, backend)


def check_learning(losses: list[float]) -> None:
    assert all(map(math.isfinite, losses))
    assert losses[-1] < losses[0] - 0.1


def test_learning_on_the_cpu(task: Task) -> None:
    check_learning(task("learn", "bf16", cpu=True))


@pytest.mark.gpu
@pytest.mark.parametrize("precision", list(FP8))
def test_learning_in_fp8(task: Task, precision: str) -> None:
    need(precision)
    losses = task("learn", precision, ENGINE)
    check_learning(losses)
    assert math.isclose(losses[-1], task("learn", "bf16", ENGINE)[-1], rel_tol=0.1)


def test_resuming_on_the_cpu_is_bitwise(task: Task) -> None:
    found = task("resume", "bf16", cpu=True)
    assert torch.equal(found["saved"], found["loaded"])
    assert found["saved scales"] == found["loaded scales"] == {}


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16", *FP8])
def test_resuming_restores_what_fp8_scales_by(task: Task, precision: str) -> None:
    need(precision, engine=True)
    found = task("resume", precision, ENGINE)
    saved, loaded = found["saved scales"], found["loaded scales"]
    assert bool(saved) == (precision == "fp8-delayed")
    assert saved.keys() == loaded.keys()
    assert all(torch.equal(saved[key], loaded[key]) for key in saved)
    histories = [tensor for key, tensor in saved.items() if key.startswith("fp8.amax_history_fwd")]
    # The saved history is not the empty history of a new model.
    assert all(history.max() > 0 for history in histories)
    # Both models made the same update, but a GPU may add numbers in any order.
    torch.testing.assert_close(found["saved"], found["loaded"], atol=1e-3, rtol=1e-3)
