"""The true score of a response, and the choice of an annotator between two responses.

The prompt names 4 letters. A response should be 4 characters long, all of them letters of the
prompt.
"""

from __future__ import annotations

import math
import random

from gspo_megatron.types import Sample

SURPLUS = 0.25  # the cost of a character too many, as a share of the value of a letter
# An annotator's preference: a logit, linear in the difference of the scores and of the lengths. So
# a letter of the prompt adds 8 / 4 + 0.3 = 2.3 to the logit. A character too many costs 8 * 0.25 /
# 4 = 0.5, and adds 0.3 by its length.
PER_SCORE, PER_CHARACTER = 8.0, 0.3


def score(letters: str, response: str) -> float:
    """Return the true score of a response, at most 1."""
    found = min(sum(letter in letters for letter in response), len(letters))
    return (found - SURPLUS * (len(response) - found)) / len(letters)


def prefers_first(letters: str, first: str, second: str, chance: random.Random) -> bool:
    """Return the noisy choice of an annotator, who prefers long responses a little."""
    better = score(letters, first) - score(letters, second)
    logit = PER_SCORE * better + PER_CHARACTER * (len(first) - len(second))
    return chance.random() < 1 / (1 + math.exp(-logit))


def true_score(sample: Sample) -> float:
    """Return the true score as a reward. This is a reward function."""
    return score(sample.prompt.removesuffix(">"), sample.response)
