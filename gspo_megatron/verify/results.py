"""The result of one policy update on a layout, and the comparison of two results."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

_MOST_LINES = 8  # the most lines about tensors whose non-finite elements differ


@dataclass
class StepResult:
    """The result of a policy update. The gradients are on rank 0 only."""

    metrics: dict[str, float]  # at least loss and grad_norm
    gradients: dict[str, Tensor] = field(default_factory=dict)  # whole parameters, on the CPU
    replica_error: float = 0.0  # largest relative difference between copies of a gradient
    loss_scale: float = 0.0  # size of the terms whose sum is the loss
    lost_in: int | None = None  # the mini-batch (from 1) whose gradient norm was not finite


def compare(
    reference: Mapping[str, Tensor], other: Mapping[str, Tensor], *, not_finite: bool = False
) -> list[tuple[str, float]]:
    """Return the relative error of every gradient, largest first. See `relative_error`."""
    assert reference.keys() == other.keys(), reference.keys() ^ other.keys()
    errors = [
        (name, relative_error(other[name], value, not_finite=not_finite))
        for name, value in reference.items()
    ]
    return sorted(errors, key=lambda pair: -pair[1])


def relative_error(
    value: Tensor, reference: Tensor, *, not_finite: bool = False, scale: float = 0.0
) -> float:
    """Return ||value - reference|| / max(||reference||, scale).

    The result is infinite if the divisor is 0 or the difference is not finite.

    `not_finite` is for two results that diverged in the same way. With it, elements that are NaN on
    both sides, or the same infinity, count as equal, and the norms are over the other elements.
    """
    value, reference = value.double(), reference.double()
    if not_finite:
        finite, equal = _both_finite(value, reference)
        if not bool((finite | equal).all()):
            return math.inf
        value, reference = value[finite], reference[finite]
    difference, size = float((value - reference).norm()), max(float(reference.norm()), scale)
    if difference == 0.0:
        return 0.0
    return difference / size if size and math.isfinite(difference) else math.inf


def metric_error(result: StepResult, expected: StepResult, name: str) -> float:
    """Return the relative error of the loss or the gradient norm.

    A loss near 0 is compared with the size of the terms in its sum. Values that are not finite have
    the error 0 if they are the same on both sides, otherwise infinity. If the steps ended in
    different mini-batches, the error of the loss is infinite."""
    if name == "loss" and result.lost_in != expected.lost_in:
        return math.inf
    scale = expected.loss_scale if name == "loss" else 0.0
    return relative_error(*_metric(result, expected, name), not_finite=True, scale=scale)


def describe_not_finite(result: StepResult, expected: StepResult) -> list[str]:
    """Return lines about values that are not finite: first values that differ between the results,
    then values that agree."""
    lines = []
    ends = [side.lost_in or "none" for side in (result, expected)]
    if ends != ["none", "none"]:
        lines.append(
            f"the step ends in mini-batch {ends[0]} (the reference's: {ends[1]}), whose gradient "
            "norm is not finite: there is no loss of the whole step"
        )
    metrics = {
        key.replace("_", " "): _metric(result, expected, key) for key in ("loss", "grad_norm")
    }
    gradients = {name: (result.gradients[name], g) for name, g in expected.gradients.items()}
    pairs = metrics | gradients
    places = {name: where_not_finite(*pair) for name, pair in pairs.items()}
    differences = [
        f"not finite in other places than the reference: {name}: {where}"
        for name, where in places.items()
        if where is not None
    ]
    more = len(differences) - _MOST_LINES
    lines += [*differences[:_MOST_LINES], f"... and {more} more"] if more > 0 else differences
    # values that are not finite in the same places on both sides
    same = [n for n, (_, value) in pairs.items() if not (places[n] or value.isfinite().all())]
    texts = [name for name in same if name in metrics]
    if len(same) > len(texts):
        texts.append(f"{len(same) - len(texts)} of {len(gradients)} gradients")
    if texts:
        lines.append(
            f"not finite, in the same places as the reference: {', '.join(texts)}; "
            "the errors are those of the finite values"
        )
    return lines


def _metric(result: StepResult, expected: StepResult, name: str) -> tuple[Tensor, Tensor]:
    """Return a metric of both results as float64 scalars."""
    sides = (result.metrics[name], expected.metrics[name])
    value, reference = torch.tensor(sides, dtype=torch.float64)
    return value, reference


def where_not_finite(value: Tensor, reference: Tensor) -> str | None:
    """Describe the elements that differ and are not finite in at least one of two tensors.

    Returns the number of these elements and the first of them, as text. If there are no such
    elements, returns None."""
    value, reference = value.double(), reference.double()
    finite, equal = _both_finite(value, reference)
    places = (~(finite | equal)).nonzero()
    if not len(places):
        return None
    place = tuple(places[0].tolist())
    there = f"{float(value[place]):g} for {float(reference[place]):g}"
    if not place:
        return there
    return f"{len(places):,} of {value.numel():,} elements, the first at {list(place)}: {there}"


def _both_finite(value: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    """Return two masks [...] bool of elements: those that are finite on both sides, and those that
    are equal (NaN equals NaN)."""
    finite = value.isfinite() & reference.isfinite()
    return finite, (value == reference) | (value.isnan() & reference.isnan())
