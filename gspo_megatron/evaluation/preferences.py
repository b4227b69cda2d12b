"""Figures of a preference model on held-out pairs or ratings, from the scores of all responses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gspo_megatron.observe.intervals import share_interval

BINS = 10  # number of bins of the calibration error, from probability 0.5 to 1


@dataclass(frozen=True)
class Pairs:
    """Chosen and rejected responses. If a prompt has several rejected responses, each of them makes
    a pair. The weights of a prompt's pairs add up to 1."""

    chosen: np.ndarray  # [pairs] int64, the number of the response
    rejected: np.ndarray  # [pairs] int64
    margins: np.ndarray  # [pairs] float64
    weights: np.ndarray  # [pairs] float64
    sources: np.ndarray  # [pairs] int64


def pair_figures(
    scores: np.ndarray, pairs: Pairs, names: Sequence[str], center_coefficient: float
) -> dict[str, float]:
    """Return the figures of all pairs by name, and the accuracy of each source.

    accuracy: the share of pairs with a higher score for the chosen response, with its 95% interval
    over prompts; equal scores count one half. calibration_error: how far the accuracy is from the
    probability that the model gives to its own choice, on average over bins of this probability.
    """
    differences = scores[pairs.chosen] - scores[pairs.rejected]
    sums = scores[pairs.chosen] + scores[pairs.rejected]
    losses = np.logaddexp(0.0, pairs.margins - differences) + center_coefficient * sums**2
    correct = (np.sign(differences) + 1) / 2
    prompts = float(pairs.weights.sum())
    figures = {
        "loss": _mean(losses, pairs.weights),
        **_accuracy(correct, pairs.weights),
        "calibration_error": _calibration_error(differences, correct, pairs.weights),
        "difference": _mean(differences, pairs.weights),
        "prompts": round(prompts),
        **_of_scores(scores),
    }
    for number, name in enumerate(names if len(names) > 1 else ()):
        own = pairs.sources == number
        accuracy = _accuracy(correct[own], pairs.weights[own])
        figures |= {f"source/{name}/{key}": value for key, value in accuracy.items()}
        figures[f"source/{name}/prompts"] = round(float(pairs.weights[own].sum()))
    return figures


def rating_figures(
    scores: np.ndarray, ratings: np.ndarray, sources: np.ndarray, names: Sequence[str]
) -> dict[str, float]:
    """Return the mean squared error of all scores, their correlation with the ratings (0 if all
    scores or all ratings are equal), and the error of each source."""
    errors = (scores - ratings) ** 2
    figures = {
        "loss": float(errors.mean()),
        "correlation": _correlation(scores, ratings),
        "prompts": len(ratings),
        **_of_scores(scores),
    }
    for number, name in enumerate(names if len(names) > 1 else ()):
        own = sources == number
        figures[f"source/{name}/loss"] = float(errors[own].mean())
        figures[f"source/{name}/prompts"] = int(own.sum())
    return figures


def _of_scores(scores: np.ndarray) -> dict[str, float]:
    return {"score_mean": float(scores.mean()), "score_std": float(scores.std())}


def _mean(values: np.ndarray, weights: np.ndarray) -> float:
    return float((values * weights).sum() / weights.sum())


def _accuracy(correct: np.ndarray, weights: np.ndarray) -> dict[str, float]:
    share = _mean(correct, weights)
    # Pairs of one prompt share its chosen response, so prompts are counted, not pairs.
    low, high = share_interval(share, max(round(float(weights.sum())), 1))
    return {"accuracy": share, "accuracy_low": low, "accuracy_high": high}


def _calibration_error(differences: np.ndarray, correct: np.ndarray, weights: np.ndarray) -> float:
    """The expected calibration error, with bins of equal width."""
    confidence = 1 / (1 + np.exp(-np.abs(differences)))  # the probability of the model's own choice
    bins = np.minimum(((confidence - 0.5) * 2 * BINS).astype(np.int64), BINS - 1)
    errors = (correct - confidence) * weights
    gaps = [abs(float(errors[bins == each].sum())) for each in np.unique(bins)]
    return sum(gaps) / float(weights.sum())


def _correlation(first: np.ndarray, second: np.ndarray) -> float:
    if len(first) < 2 or not first.std() or not second.std():
        return 0.0
    return float(np.corrcoef(first, second)[0, 1])
