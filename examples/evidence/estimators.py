"""How good is a gradient? Bias, noise and direction of a random gradient, from samples of it.

An objective's gradient on one batch, g, is a random vector. It is compared with the policy gradient
r on fresh samples of the present policy, which is unbiased. Only inner products of the samples are
needed. Squares of means are estimated without the bias of a plain square: two different batches are
independent, so the mean of <g_a, g_b> over a != b is <E g, E g>.

The bias alone is measured against another gradient u on the same batches: importance weights of
whole responses, the product of their tokens' ratios, make it unbiased. What g and u have in common
cancels in their difference, so a small bias is seen through a large noise.

All figures are free of units: lengths are in |E r|, the length of the true gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

RESAMPLES = 1000
LEVEL = 0.95  # of the intervals


@dataclass(frozen=True)
class Products:
    """Inner products of an objective's gradients with each other and with the reference's.

    All arrays are float64.
    """

    own: np.ndarray  # [batches, batches], <g_a, g_b>
    difference: np.ndarray  # [batches, batches], <g_a - u_a, g_b - u_b>
    cross: np.ndarray  # [batches, reference batches], <g_a, r_m>
    reference: np.ndarray  # [reference batches, reference batches], <r_m, r_n>

    def resampled(self, rng: np.random.Generator) -> Products:
        """Batches drawn with replacement, as the bootstrap wants them."""
        ours = rng.integers(0, len(self.own), len(self.own))
        theirs = rng.integers(0, len(self.reference), len(self.reference))
        return Resampled(
            self.own[np.ix_(ours, ours)],
            self.difference[np.ix_(ours, ours)],
            self.cross[np.ix_(ours, theirs)],
            self.reference[np.ix_(theirs, theirs)],
            ours[:, None] != ours,
            theirs[:, None] != theirs,
        )

    @property
    def different(self) -> tuple[np.ndarray, np.ndarray]:
        """Which pairs are of two batches: of the objective's, and of the reference's."""
        return tuple(~np.eye(len(matrix), dtype=bool) for matrix in (self.own, self.reference))


@dataclass(frozen=True)
class Resampled(Products):
    """A batch that was drawn twice makes no pair with itself."""

    own_pairs: np.ndarray
    reference_pairs: np.ndarray

    @property
    def different(self) -> tuple[np.ndarray, np.ndarray]:
        return self.own_pairs, self.reference_pairs


def quality(products: Products) -> dict[str, float]:
    """Figures of one objective. With G = E g and R = E r:

    projection  <G, R> / |R|^2: 1 is a step of full length; below: clipped, or pointing elsewhere
    bias        |G - E u| / |R|
    direction   the cosine between G and R: what is left after any number of batches
    noise       trace(Cov g) / |R|^2, of one batch
    signal      |G|^2 / trace(Cov g), signal-to-noise ratio of one batch
    cosine      mean of the cosine between one batch's g and R
    """
    ours, theirs = products.different
    squared = products.own[ours].mean()  # |G|^2
    true = products.reference[theirs].mean()  # |R|^2
    inner = products.cross.mean()  # <G, R>
    trace = products.own.diagonal().mean() - squared
    lengths = np.sqrt(products.own.diagonal())
    if true <= 0:
        return dict.fromkeys(FIGURES, float("nan"))  # all noise: nothing to compare with
    # an objective that clips everything has no gradient, and no direction
    cosines = np.divide(
        products.cross.mean(1), lengths, out=np.zeros_like(lengths), where=lengths > 0
    )
    return {
        "projection": inner / true,
        "bias": np.sqrt(max(products.difference[ours].mean(), 0.0) / true),
        "direction": inner / np.sqrt(squared * true) if squared > 0 else float("nan"),
        "noise": trace / true,
        "signal": max(squared, 0.0) / trace if trace > 0 else float("nan"),
        "cosine": cosines.mean() / np.sqrt(true),
    }


FIGURES = ("projection", "bias", "direction", "noise", "signal", "cosine")


def with_intervals(products: Products, seed: int = 0) -> dict[str, list[float]]:
    """Each figure as [value, low, high]: the bootstrap's percentiles over batches."""
    rng, value = np.random.default_rng(seed), quality(products)
    drawn = [quality(products.resampled(rng)) for _ in range(RESAMPLES)]
    tails = [100 * (1 - LEVEL) / 2, 100 * (1 + LEVEL) / 2]
    found = {}
    for name in FIGURES:
        low, high = np.nanpercentile([each[name] for each in drawn], tails)
        found[name] = [float(value[name]), float(low), float(high)]
    return found


def ratio_figures(log_ratios: np.ndarray) -> dict[str, Any]:
    """What theory needs of the token log-ratios [sequences, tokens], and what it predicts.

    The mean of L terms with standard deviation d and correlation c between two of them has the
    variance d^2 (1 + (L - 1) c) / L. Without correlation GSPO's noise falls as 1 / sqrt(L).
    """
    length = log_ratios.shape[1]
    means = log_ratios.mean(1)
    deviation, of_means = log_ratios.std(), means.std()
    correlation = 0.0
    if length > 1 and deviation > 0:
        correlation = ((of_means / deviation) ** 2 * length - 1) / (length - 1)
    products = log_ratios.sum(1)
    return {
        "token_deviation": float(deviation),
        "sequence_deviation": float(of_means),
        "correlation": float(correlation),
        "independent_deviation": float(deviation / np.sqrt(length)),
        "token_sample_share": effective_share(log_ratios.ravel()),
        "sequence_sample_share": effective_share(means),
        "product_sample_share": effective_share(products),
    }


def effective_share(log_weights: np.ndarray) -> float:
    """Effective sample size of importance weights over their number: (sum w)^2 / (n sum w^2)."""
    weights = np.exp(log_weights - log_weights.max())
    return float(weights.sum() ** 2 / (len(weights) * (weights**2).sum()))
