"""The differences between two results, also if a step has diverged."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from gspo_megatron.verify.results import (
    StepResult,
    compare,
    describe_not_finite,
    metric_error,
    relative_error,
    where_not_finite,
)

NAN, INF = math.nan, math.inf


def test_the_error_is_that_of_the_whole() -> None:
    reference = torch.tensor([3.0, 4.0])
    assert relative_error(reference.clone(), reference) == 0.0
    assert relative_error(torch.tensor([3.0, 4.5]), reference) == pytest.approx(0.1)
    assert relative_error(torch.zeros(2), torch.zeros(2)) == 0.0
    assert relative_error(torch.ones(2), torch.zeros(2)) == INF


def test_unless_asked_nothing_is_equal_to_what_is_no_number() -> None:
    lost = torch.tensor([NAN, 4.0])
    assert relative_error(lost, lost.clone()) == INF
    assert compare({"a": lost}, {"a": lost.clone()}) == [("a", INF)]


def test_of_what_diverged_alike_the_rest_is_compared() -> None:
    reference = torch.tensor([NAN, INF, -INF, 3.0, 4.0])
    same = reference.clone()
    assert relative_error(same, reference, not_finite=True) == 0.0
    assert where_not_finite(same, reference) is None
    other = torch.tensor([NAN, INF, -INF, 3.0, 4.5])
    assert relative_error(other, reference, not_finite=True) == pytest.approx(0.1)
    assert where_not_finite(other, reference) is None
    whole = torch.full((2, 3), NAN)
    assert relative_error(whole.clone(), whole, not_finite=True) == 0.0


@pytest.mark.parametrize(
    ("value", "reference", "place"),
    [
        ([1.0, NAN], [1.0, 2.0], "1 of 2 elements, the first at [1]: nan for 2"),
        ([1.0, 2.0], [NAN, NAN], "2 of 2 elements, the first at [0]: 1 for nan"),
        ([INF, 2.0], [-INF, 2.0], "1 of 2 elements, the first at [0]: inf for -inf"),
        ([NAN, 2.0], [INF, 2.0], "1 of 2 elements, the first at [0]: nan for inf"),
    ],
)
def test_what_diverged_elsewhere_differs(
    value: list[float], reference: list[float], place: str
) -> None:
    mine, theirs = torch.tensor(value), torch.tensor(reference)
    assert relative_error(mine, theirs, not_finite=True) == INF
    assert where_not_finite(mine, theirs) == place
    others = torch.ones(3)
    errors = compare({"a": others, "b": theirs}, {"a": others, "b": mine}, not_finite=True)
    assert errors == [("b", INF), ("a", 0.0)]


def test_a_figure_has_no_place() -> None:
    assert where_not_finite(torch.tensor(NAN), torch.tensor(0.5)) == "nan for 0.5"
    assert where_not_finite(torch.tensor(0.25), torch.tensor(0.5)) is None


def result(*, loss: float = NAN, grad_norm: float = INF, **changes: Any) -> StepResult:
    gradients = {"weight": torch.tensor([[1.0, NAN]]), "bias": torch.ones(2)}
    fields = {"gradients": gradients, "loss_scale": 1.0} | changes
    return StepResult({"loss": loss, "grad_norm": grad_norm}, **fields)


def test_figures_that_are_lost_alike_have_nometric_error() -> None:
    for key in ("loss", "grad_norm"):
        assert metric_error(result(), result(), key) == 0.0
        assert metric_error(result(**{key: 1.0}), result(), key) == INF
        assert metric_error(result(), result(**{key: 1.0}), key) == INF
    assert metric_error(result(grad_norm=NAN), result(), "grad_norm") == INF
    assert metric_error(result(grad_norm=-INF), result(), "grad_norm") == INF
    small = result(loss=1e-9)
    assert metric_error(result(loss=3e-9), small, "loss") == pytest.approx(2e-9)


def test_what_is_lost_alike_is_said() -> None:
    assert describe_not_finite(result(), result()) == [
        "not finite, in the same places as the reference: loss, grad norm, 1 of 2 gradients; the "
        "errors are those of the finite values"
    ]
    sound = result(loss=1.0, grad_norm=1.0, gradients={"bias": torch.ones(2)})
    assert describe_not_finite(sound, sound) == []


def test_what_is_lost_on_one_side_is_named() -> None:
    other = result(loss=1.0, gradients=result().gradients | {"bias": torch.tensor([1.0, INF])})
    start = "not finite in other places than the reference: "
    assert describe_not_finite(other, result()) == [
        f"{start}loss: 1 for nan",
        f"{start}bias: 1 of 2 elements, the first at [1]: inf for 1",
        "not finite, in the same places as the reference: grad norm, 1 of 2 gradients; the errors "
        "are those of the finite values",
    ]
    many = {f"w{n}": torch.zeros(1) for n in range(20)}
    lost = {name: torch.full((1,), NAN) for name in many}
    sound = {"loss": 1.0, "grad_norm": 1.0}
    lines = describe_not_finite(result(gradients=lost, **sound), result(gradients=many, **sound))
    assert len(lines) == 9 and lines[-1] == "... and 12 more"


def test_where_a_step_ended_is_said() -> None:
    (line, _) = describe_not_finite(result(lost_in=2), result())
    assert metric_error(result(lost_in=2), result(), "loss") == INF
    assert metric_error(result(lost_in=2), result(lost_in=2), "loss") == 0.0
    assert line.startswith("the step ends in mini-batch 2 (the reference's: none), whose gradient")
