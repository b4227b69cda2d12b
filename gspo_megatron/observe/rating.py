"""An offline estimate of a Codeforces rating, from the standings of past contests.

For each contest: the place that the model's score would have had, and the rating R of which the Elo
formula expects that place (CodeElo, arXiv 2501.01257): 1 + Σ_i 1 / (1 + 10^((R − R_i) / 400)), over
the participants i. The estimate is the mean over contests. It is not a rating: nobody competed,
times of submission are unknown, and arXiv 2602.05891 finds that the order of submissions moves it
by 394 points, and the choice of contests by 1,122. The interval covers the latter only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq

from gspo_megatron.observe.intervals import bootstrap_interval

LEAST, MOST = 0.0, 4000.0  # ratings that a place may stand for
_LEAST_SHARE = 0.3  # of a problem's points that are left when it is solved, however late


@dataclass(frozen=True)
class Contest:
    """The standings of a contest with rated participants, without the model."""

    ratings: Sequence[float]  # [participants], before the contest
    scores: Sequence[float]  # [participants], their points

    def place(self, score: float) -> float:
        """The place, from 1, that a score would have had; among equal scores the middle."""
        scores = np.asarray(self.scores, dtype=np.float64)
        return 1.0 + float((scores > score).sum()) + float((scores == score).sum()) / 2

    def expected_place(self, rating: float) -> float:
        """The place that the Elo formula expects of a rating."""
        above = np.asarray(self.ratings, dtype=np.float64)
        return 1.0 + float((1.0 / (1.0 + 10.0 ** ((rating - above) / 400.0))).sum())

    def rating_of(self, score: float) -> float:
        """The rating of which the place of `score` is expected, within LEAST and MOST: the first
        place stands for no finite rating, and neither does the last."""
        place = self.place(score)
        if place <= self.expected_place(MOST):
            return MOST
        if place >= self.expected_place(LEAST):
            return LEAST
        return float(brentq(lambda rating: self.expected_place(rating) - place, LEAST, MOST))


def score_of(
    points: Sequence[float], attempts: Sequence[Sequence[bool]], penalty: float = 50.0
) -> float:
    """The points of a contest, where attempts[p] are the model's submissions to problem p in their
    order. A solved problem gives its points, less `penalty` for each wrong submission before, and
    no less than 30% of them; time costs nothing."""
    total = 0.0
    for worth, submitted in zip(points, attempts, strict=True):
        if any(submitted):
            wrong = list(submitted).index(True)
            total += max(worth - penalty * wrong, _LEAST_SHARE * worth)
    return total


@dataclass(frozen=True)
class RatingEstimate:
    """The mean over contests with its 95% bootstrap interval over contests."""

    rating: float
    low: float
    high: float
    of_contests: tuple[float, ...]


def estimate_rating(
    contests: Sequence[Contest], scores: Sequence[float], seed: int = 0
) -> RatingEstimate:
    """The estimate for a model with these scores, one for each contest. Raises ValueError without
    contests, or where there are not as many scores, or a contest has no participants."""
    if not contests or len(contests) != len(scores):
        raise ValueError(f"{len(scores)} scores for {len(contests)} contests; legal: one for each")
    for number, contest in enumerate(contests):
        if not contest.ratings or len(contest.ratings) != len(contest.scores):
            found = f"{len(contest.ratings)} ratings and {len(contest.scores)} scores"
            raise ValueError(f"contest {number}: {found}; legal: as many of both, and some")
    found = [contest.rating_of(score) for contest, score in zip(contests, scores)]
    low, high = bootstrap_interval(found, seed)
    return RatingEstimate(float(np.mean(found)), low, high, tuple(found))
