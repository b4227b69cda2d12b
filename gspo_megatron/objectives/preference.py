"""The losses of preference models: pure functions of the scores, their gradients by autograd."""

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
    The loss of a pair is -log of it, with the margin taken from the difference. Of several rejected
    responses to a prompt each makes a pair, of weight 1 / number. `center_coefficient` adds the
    squared sum of both scores of a pair: the differences alone leave a constant free (section 4 of
    arXiv:2312.09244).

    chosen, rejected, margins, weights: [pairs] each.
    """
    losses = -F.logsigmoid(chosen - rejected - margins)
    if center_coefficient:
        losses = losses + center_coefficient * (chosen + rejected).square()
    return (weights * losses).sum()


def regression(scores: Tensor, ratings: Tensor) -> Tensor:
    """Return the sum of the squared errors of scores from ratings, [sequences] each, a scalar."""
    return (scores - ratings).square().sum()
