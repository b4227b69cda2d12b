"""The figures of a preference model on held-out data, compared with loops over prompts and
responses."""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import dataclass

import numpy as np
import pytest
from scipy import stats

from gspo_megatron.evaluation.preferences import Pairs, pair_figures, rating_figures

NAMES = ["chat", "code"]
CENTER = 0.05


@dataclass(frozen=True)
class Group:
    """A prompt: the scores of its chosen and of its rejected responses, and the margins."""

    chosen: float
    rejected: list[float]
    margins: list[float]
    source: int

    def rows(self) -> list[tuple[float, float, float, float]]:
        """The score of the chosen and of a rejected response, the margin, and the pair's weight."""
        pairs = zip(self.rejected, self.margins, strict=True)
        return [(self.chosen, other, margin, 1 / len(self.margins)) for other, margin in pairs]


def groups_of(seed: int, count: int = 23) -> list[Group]:
    """Groups of different sizes. Some differences are large, and some scores are equal."""
    draw, found = random.Random(seed), []
    for number in range(count):
        size = draw.randint(1, 4)
        chosen, others = draw.gauss(0.5, 2), [draw.gauss(0, 2) for _ in range(size)]
        if number % 5 == 0:
            others[-1] = chosen
        if number % 7 == 0:
            others[0] = chosen - 9.0
        found.append(Group(chosen, others, [draw.random() for _ in others], draw.randrange(2)))
    return found


def arrays_of(groups: list[Group]) -> tuple[np.ndarray, Pairs]:
    scores: list[float] = []
    columns: list[list[float]] = [[], [], [], [], []]
    for group in groups:
        first = len(scores)
        scores += [group.chosen, *group.rejected]
        for number, (*_, margin, weight) in enumerate(group.rows(), start=1):
            values = (first, first + number, margin, weight, group.source)
            for column, value in zip(columns, values, strict=True):
                column.append(value)
    chosen, rejected, margins, weights, sources = map(np.array, columns)
    return np.array(scores), Pairs(chosen, rejected, margins, weights, sources)


def half_wins(groups: list[Group]) -> float:
    """The accuracy. Each prompt has the weight 1, and a tie is half right."""
    return math.fsum(
        weight * (1.0 if chosen > other else 0.5 * (chosen == other))
        for group in groups
        for chosen, other, _, weight in group.rows()
    ) / len(groups)


def calibration(groups: list[Group]) -> float:
    """The expected calibration error in ten bins of the probability of the model's own choice."""
    gaps = [0.0] * 10
    for group in groups:
        for chosen, other, _, weight in group.rows():
            stated = 1 / (1 + math.exp(-abs(chosen - other)))
            right = 1.0 if chosen > other else 0.5 * (chosen == other)
            gaps[min(int((stated - 0.5) / 0.05), 9)] += weight * (right - stated)
    return sum(map(abs, gaps)) / len(groups)


def assert_wilsons(low: float, high: float, share: float, count: int) -> None:
    """The bounds of Wilson's interval are the shares from which `share` is 1.96 of their own
    standard errors away."""
    assert low < share < high
    for bound in (low, high):
        error = math.sqrt(bound * (1 - bound) / count)
        assert abs(share - bound) == pytest.approx(stats.norm.ppf(0.975) * error, rel=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_figures_of_pairs_are_means_over_prompts(seed: int) -> None:
    groups = groups_of(seed)
    scores, pairs = arrays_of(groups)
    found = pair_figures(scores, pairs, NAMES, CENTER)
    losses, differences = [], []
    for group in groups:
        loss = difference = 0.0
        for own, other, margin, weight in group.rows():
            loss += weight * math.log1p(math.exp(margin - (own - other)))
            loss += weight * CENTER * (own + other) ** 2
            difference += weight * (own - other)
        losses.append(loss)
        differences.append(difference)
    expected = {
        "loss": statistics.fmean(losses),
        "accuracy": half_wins(groups),
        "calibration_error": calibration(groups),
        "difference": statistics.fmean(differences),
        "prompts": len(groups),
        "score_mean": statistics.fmean(scores),
        "score_std": statistics.pstdev(scores),
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-12)
    bounds = found["accuracy_low"], found["accuracy_high"]
    assert_wilsons(*bounds, expected["accuracy"], len(groups))
    for number, name in enumerate(NAMES):
        own = [group for group in groups if group.source == number]
        assert found[f"source/{name}/accuracy"] == pytest.approx(half_wins(own), rel=1e-12)
        assert found[f"source/{name}/prompts"] == len(own)
        low, high = (found[f"source/{name}/accuracy_{side}"] for side in ("low", "high"))
        assert_wilsons(low, high, half_wins(own), len(own))
    alone = pair_figures(scores, pairs, NAMES[:1], CENTER)
    assert not [name for name in alone if name.startswith("source/")]


def test_a_model_that_is_as_sure_as_it_is_right_is_calibrated() -> None:
    """With a difference of log 3, the model gives 3/4 to its choice, which is right in three of
    four cases."""
    margin = math.log(3)
    groups = [Group(margin, [0.0], [0.0], 0)] * 3 + [Group(0.0, [margin], [0.0], 0)]
    found = pair_figures(*arrays_of(groups), ["one"], 0.0)
    assert found["accuracy"] == 0.75 and found["calibration_error"] == pytest.approx(0, abs=1e-15)


@pytest.mark.parametrize("seed", range(3))
def test_figures_of_ratings(seed: int) -> None:
    source = np.random.default_rng(seed)
    scores, sources = source.normal(size=31), source.integers(2, size=31)
    ratings = 0.4 * scores + source.normal(size=31) + 2.0
    found = rating_figures(scores, ratings, sources, NAMES)
    errors = [(s - r) ** 2 for s, r in zip(scores.tolist(), ratings.tolist(), strict=True)]
    expected = {
        "loss": statistics.fmean(errors),
        "correlation": stats.pearsonr(scores, ratings).statistic,
        "prompts": 31,
        "score_mean": statistics.fmean(scores),
        "score_std": statistics.pstdev(scores),
    }
    for number, name in enumerate(NAMES):
        own = [error for error, each in zip(errors, sources, strict=True) if each == number]
        expected |= {f"source/{name}/loss": statistics.fmean(own)}
        expected |= {f"source/{name}/prompts": len(own)}
    assert found == pytest.approx(expected, rel=1e-12)
    for equal in ((scores, np.full(31, 0.5)), (np.full(31, 0.5), ratings)):
        assert rating_figures(*equal, sources, NAMES)["correlation"] == 0
