"""The estimate of a rating, compared with closed forms, a second solver and a simulation."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import numpy as np
import pytest

from examples.evaluation.codeforces import LEAST, MOST, Contest, score_of


def by_steps(ratings: list[float], place: float) -> float:
    """The rating at which the expected place is `place`. Plain Python searches it in steps of 1,
    and then in steps of 0.001."""

    def expected(rating: float) -> float:
        return 1 + sum(1 / (1 + math.exp((rating - r) * math.log(10) / 400)) for r in ratings)

    start = next(r for r in range(int(MOST)) if expected(r + 1) <= place)
    return min((start + n / 1000 for n in range(1001)), key=lambda r: abs(expected(r) - place))


def test_ratings_are_those_of_an_independent_solver() -> None:
    random_numbers = random.Random(0)
    for size in (2, 7, 40):
        ratings = [random_numbers.uniform(800, 3000) for _ in range(size)]
        scores = [float(random_numbers.randrange(0, 5000, 500)) for _ in range(size)]
        for score in (250.0, scores[0], 2600.0):
            contest = Contest(ratings, scores)
            better = sum(s > score for s in scores)
            place = Fraction(1) + better + Fraction(sum(s == score for s in scores), 2)
            assert contest.place(score) == float(place)
            found = contest.rating_of(score)
            if LEAST < found < MOST:
                assert found == pytest.approx(by_steps(ratings, float(place)), abs=0.01)


def test_equal_opponents_have_a_closed_form() -> None:
    """With n opponents of rating r, the rating R solves 1 + n / (1 + 10^((R - r) / 400)) =
    place."""
    for n, ahead in ((3, 1), (10, 2), (10, 8)):
        contest = Contest([1500.0] * n, [2.0] * ahead + [0.0] * (n - ahead))
        expected = 1500 + 400 * math.log10(n / ahead - 1)
        assert contest.rating_of(1.0) == pytest.approx(expected)
    # The player beats one of two opponents, so the rating is between those of the opponents.
    assert Contest([1400.0, 1600.0], [0.0, 2.0]).rating_of(1.0) == pytest.approx(1500)
    assert Contest([1700.0], [5.0]).rating_of(5.0) == pytest.approx(1700)  # a tie


def test_first_and_last_places_end_at_the_bounds() -> None:
    contest = Contest([1200.0, 1900.0], [1.0, 2.0])
    assert contest.rating_of(3.0) == MOST and contest.rating_of(0.0) == LEAST


def test_a_player_of_the_model_gets_its_rating_back() -> None:
    """The results against the opponents are drawn by the Elo formula, for a player with the rating
    1,800."""
    numbers, truth = np.random.default_rng(0), 1800.0
    contests = []
    for _ in range(40):
        ratings = numbers.normal(1600, 350, size=200)
        wins = numbers.random(200) < 1 / (1 + 10 ** ((truth - ratings) / 400))
        contests.append(Contest(ratings.tolist(), (2.0 * wins).tolist()))
    ratings = [contest.rating_of(1.0) for contest in contests]
    assert np.mean(ratings) == pytest.approx(truth, abs=30)


def test_points_of_submissions() -> None:
    points = [500.0, 1000.0, 1500.0, 2000.0]
    attempts = [[True], [False, False, True], [False] * 8, [False] * 40 + [True]]
    assert score_of(points, attempts) == 500 + 900 + 0 + 600
    assert score_of([1000.0], [[False, True]], penalty=0.0) == 1000


def test_submissions_after_the_solution_cost_nothing() -> None:
    """After the problem is solved, right and wrong submissions cost nothing."""
    for more in ([False], [False] * 9, [True], [False, True, False]):
        assert score_of([1000.0], [[True, *more]]) == 1000
        assert score_of([1000.0], [[False, True, *more]]) == 950
