"""The losses of preference models: pure functions of the scores. Autograd computes their
gradients."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def bradley_terry(
    chosen: Tensor,
    rejected: Tensor,
    margins: Tensor,
    weights: Tensor,
    *,
    center_coefficient: float = 0.0,
) -> Tensor:
    """Return the sum of the losses of pairs, a scalar.

    The probability that the chosen response is better is a sigmoid of the difference of the scores.
    The margin is subtracted from the difference before the sigmoid. The loss of a pair is minus the
    log of this probability. If a prompt has n rejected responses, each of them makes a pair of
    weight 1 / n. `center_coefficient` times the squared sum of both scores of a pair is added,
    because the differences alone do not determine the level of the scores (section 4 of
    arXiv:2312.09244).

    chosen, rejected, margins, weights: [pairs] each.
    """
    losses = -F.logsigmoid(chosen - rejected - margins)
    if center_coefficient:
        losses = losses + center_coefficient * (chosen + rejected).square()
    return (weights * losses).sum()


def regression(scores: Tensor, ratings: Tensor) -> Tensor:
    """Return the sum of the squared differences between scores and ratings, a scalar.

    scores, ratings: [sequences] each.
    """
    return (scores - ratings).square().sum()
