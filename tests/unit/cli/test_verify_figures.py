"""What `verify` makes of two results of which something is not finite."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from gspo_megatron.cli.verify import _error, _not_finite

NAN, INF = math.nan, math.inf


def result(**changes: Any) -> dict[str, Any]:
    gradients = {"weight": torch.tensor([[1.0, NAN]]), "bias": torch.ones(2)}
    return {
        "gradients": gradients,
        "loss": NAN,
        "loss_scale": 1.0,
        "grad_norm": INF,
        "lost_in": None,
    } | changes


def test_figures_that_are_lost_alike_have_no_error() -> None:
    for key in ("loss", "grad_norm"):
        assert _error(result(), result(), key) == 0.0
        assert _error(result(**{key: 1.0}), result(), key) == INF
        assert _error(result(), result(**{key: 1.0}), key) == INF
    assert _error(result(grad_norm=NAN), result(), "grad_norm") == INF
    assert _error(result(grad_norm=-INF), result(), "grad_norm") == INF
    small = result(loss=1e-9)
    assert _error(result(loss=3e-9), small, "loss") == pytest.approx(2e-9)


def test_what_is_lost_alike_is_said() -> None:
    assert _not_finite(result(), result()) == [
        "not finite, in the same places as the reference: loss, grad norm, 1 of 2 gradients; the "
        "errors are those of the rest"
    ]
    sound = result(loss=1.0, grad_norm=1.0, gradients={"bias": torch.ones(2)})
    assert _not_finite(sound, sound) == []


def test_what_is_lost_on_one_side_is_named() -> None:
    other = result(loss=1.0, gradients=result()["gradients"] | {"bias": torch.tensor([1.0, INF])})
    start = "not finite in other places than the reference: "
    assert _not_finite(other, result()) == [
        f"{start}loss: 1 for nan",
        f"{start}bias: 1 of 2 elements, the first at [1]: inf for 1",
        "not finite, in the same places as the reference: grad norm, 1 of 2 gradients; the errors "
        "are those of the rest",
    ]
    many = {f"w{n}": torch.zeros(1) for n in range(20)}
    lost = {name: torch.full((1,), NAN) for name in many}
    sound = {"loss": 1.0, "grad_norm": 1.0}
    lines = _not_finite(result(gradients=lost, **sound), result(gradients=many, **sound))
    assert len(lines) == 9 and lines[-1] == "... and 12 more"


def test_where_a_step_ended_is_said() -> None:
    (line, _) = _not_finite(result(lost_in=2), result())
    assert _error(result(lost_in=2), result(), "loss") == INF
    assert _error(result(lost_in=2), result(lost_in=2), "loss") == 0.0
    assert line.startswith("the step ends in mini-batch 2 (the reference's: none), whose gradient")
