"""Estimates of a gradient's quality: bias and noise of its step along the policy gradient.

Let D be a fixed direction of length 1 (here: an estimate of the policy gradient). The policy
gradient's step along D is t = <grad J, D>, the slope of the reward. An objective's gradient g on a
batch has a random step p = <g, D> along D. Both t and p are means over independent groups of
responses, so the mean of each group is enough to estimate them. With B groups in a batch:

    plain       E p / t, from the sample's mean alone
    projection  E p / t, estimated with the control variate below. If it is 1, the step is unbiased.
                If it is smaller, the step is too short. If it is negative, the step lowers the
                reward
    noise       Var p / t^2, of one batch
    signal      (E p)^2 / Var p, the signal-to-noise ratio of one batch

Two more figures compare each objective with a base objective on the same responses:

    difference    the objective's projection minus the base's projection
    signal_ratio  the objective's signal divided by the base's signal

For one objective, `unbiased` (importance weights of whole responses), the expectation of the step u
is known: E u = t. So u serves as a control variate. If the sample's mean of u is too large, the
means of correlated steps p are too large as well. So E p is estimated as mean p - b (mean u - t),
with b = Cov(p, u) / Var u. This does not change the expectation, and removes most of the noise if
the weights of `unbiased` are not too extreme.

Intervals are percentiles of a bootstrap over groups. All objectives use the same groups, so one
resample of the groups serves all objectives. The groups that estimate t are resampled separately.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

RESAMPLES = 1000
LEVEL = 0.95  # the level of all intervals
GROUPS = 8  # the number of groups in the batch whose noise is reported
FIGURES = ("plain", "projection", "noise", "signal", "difference", "signal_ratio")


def figures(
    own: Mapping[str, np.ndarray], true: np.ndarray, *, base: str, unbiased: str, seed: int = 0
) -> dict[str, dict[str, list[float]]]:
    """The figures that the docstring of this module describes, each as [value, low, high]. `own`
    has, for each objective, the mean step of each group [groups], on the same responses. `true` has
    the mean steps of the policy gradient, on groups that are not in `own`."""
    rng = np.random.default_rng(seed)
    names = list(own)
    steps = np.stack([own[name] for name in names])  # [objectives, groups]
    count = steps.shape[1]
    counts = rng.multinomial(count, np.full(count, 1 / count), RESAMPLES)
    others = rng.multinomial(len(true), np.full(len(true), 1 / len(true)), RESAMPLES)
    weights = np.vstack([np.ones(count), counts]) / count  # the first row is the sample itself
    of_true = np.vstack([np.ones(len(true)), others]) / len(true) @ true  # [1 + resamples]

    t = of_true[:, None]
    mean = weights @ steps.T  # [1 + resamples, objectives]
    variance = weights @ (steps**2).T - mean**2
    known, reference = names.index(unbiased), names.index(base)
    covariance = weights @ (steps * steps[known]).T - mean * mean[:, [known]]
    with np.errstate(divide="ignore", invalid="ignore"):
        expected = mean - covariance / variance[:, [known]] * (mean[:, [known]] - t)
        of_batch = np.maximum(variance, 0.0) * count / (count - 1) / GROUPS
        signal = np.where(of_batch > 0, expected**2 / of_batch, np.nan)
        found = {
            "plain": mean / t,
            "projection": expected / t,
            "noise": of_batch / t**2,
            "signal": signal,
            "difference": (expected - expected[:, [reference]]) / t,
            "signal_ratio": signal / signal[:, [reference]],
        }
    return {
        name: {figure: with_interval(found[figure][:, place]) for figure in FIGURES}
        for place, name in enumerate(names)
    }


def with_interval(values: np.ndarray) -> list[float]:
    """[value, low, high] from values [1 + resamples]: first the value of the sample, then the
    values of the resamples."""
    tails = [100 * (1 - LEVEL) / 2, 100 * (1 + LEVEL) / 2]
    low, high = np.nanpercentile(values[1:], tails) if np.isfinite(values).any() else (np.nan,) * 2
    return [float(values[0]), float(low), float(high)]


def mean_interval(values: np.ndarray, seed: int = 0) -> list[float]:
    """[mean, low, high] of independent values, by the bootstrap."""
    rng = np.random.default_rng(seed)
    drawn = rng.choice(values, (RESAMPLES, len(values))).mean(1)
    return with_interval(np.concatenate([[values.mean()], drawn]))


def ratio_figures(log_ratios: np.ndarray) -> dict[str, Any]:
    """Figures of the token log-ratios [sequences, tokens], and what theory predicts from them.

    The mean of L terms with standard deviation d, and correlation c between any two of them, has
    the variance d^2 (1 + (L - 1) c) / L. Without correlation GSPO's noise falls as 1 / sqrt(L).
    """
    length = log_ratios.shape[1]
    means = log_ratios.mean(1)
    deviation, of_means = log_ratios.std(), means.std()
    correlation = 0.0
    if length > 1 and deviation > 0:
        correlation = ((of_means / deviation) ** 2 * length - 1) / (length - 1)
    return {
        "kl": float(-log_ratios.mean()),
        "token_deviation": float(deviation),
        "sequence_deviation": float(of_means),
        "correlation": float(correlation),
        "independent_deviation": float(deviation / np.sqrt(length)),
        "product_deviation": float(of_means * length),
        "token_sample_share": effective_share(log_ratios.ravel()),
        "sequence_sample_share": effective_share(means),
        "product_sample_share": effective_share(log_ratios.sum(1)),
    }


def effective_share(log_weights: np.ndarray) -> float:
    """The effective sample size of importance weights, divided by their number: (sum w)^2 / (n sum
    w^2)."""
    weights = np.exp(log_weights - log_weights.max())
    return float(weights.sum() ** 2 / (len(weights) * (weights**2).sum()))
