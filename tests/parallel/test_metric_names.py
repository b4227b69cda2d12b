"""A custom objective returns metrics with different names on different ranks. The processes use
real gloo."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist

from gspo_megatron.errors import UserError
from gspo_megatron.platform.reduce_metrics import StepMetrics
from tests.parallel.pool import Pool


def reduce_by_rank(means: list[list[str]], values: list[list[str]]) -> str:
    """The result of this rank's reduction. Rank r collects the names means[r] and values[r]."""
    rank = dist.get_rank()
    metrics = StepMetrics(torch.device("cpu"))
    metrics.add_means({name: torch.tensor([1.0 + rank, 2.0]) for name in means[rank]})
    metrics.add_values({name: torch.ones(1 + rank) for name in values[rank]})
    try:
        return str(metrics.reduce(dist.group.WORLD))
    except UserError as error:
        return str(error)


@pytest.mark.parametrize(
    ("means", "values", "missing"),
    [
        # Equally many metrics with different names, which would be added to each other.
        (
            [["loss", "mine/a"], ["loss", "mine/b"]],
            [[], []],
            {"means['mine/a'] is missing on rank 1", "means['mine/b'] is missing on rank 0"},
        ),
        # Different numbers of metrics, at which the collective would abort.
        ([["loss", "mine/a"], ["loss"]], [[], []], {"means['mine/a'] is missing on rank 1"}),
        (
            [["loss"], []],
            [["x"], ["x", "y/sequence"]],
            {"means['loss'] is missing on rank 1", "values['y/sequence'] is missing on rank 0"},
        ),
        (
            [["x"], []],
            [[], ["x"]],
            {"means['x'] is missing on rank 1", "values['x'] is missing on rank 0"},
        ),
    ],
)
def test_names_that_differ_are_named_on_all_ranks(
    pool: Pool, means: list[list[str]], values: list[list[str]], missing: set[str]
) -> None:
    error, other = pool.run(2, reduce_by_rank, means=means, values=values)
    assert error == other and "\n" not in error
    assert set(re.findall(r"\w+\['[\w/]+'\] is missing on rank \d", error)) == missing


def test_the_same_names_are_reduced_in_any_order_of_their_arrival(pool: Pool) -> None:
    means, values = [["loss", "mine/a"], ["mine/a", "loss"]], [["x/sequence"], ["x/sequence"]]
    result, other = pool.run(2, reduce_by_rank, means=means, values=values)
    assert result == other
    assert "'loss': 0.75, 'mine/a': 0.75, 'x/sequence/min': 1.0" in result
