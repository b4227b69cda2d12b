"""What two gradients differ by, those of a step that has diverged too."""

from __future__ import annotations

import math

import pytest
import torch

from gspo_megatron.verify.parity import compare, relative_error, where_not_finite

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
