"""What a response is worth, and which of two responses an annotator prefers.

The prompt names 4 letters. A response should be 4 characters long, all of them of the prompt.
"""

from __future__ import annotations

import math
import random

from gspo_megatron.types import Sample

SURPLUS = 0.25  # what a character too many costs, in parts of a letter
# An annotator's preference: a logit, linear in the difference of the scores and of the lengths.
# So a letter that is wanted gives 8 / 4 + 0.3 = 2.3. A character too many costs 8 * 0.25 / 4 = 0.5,
# and gives 0.3 because it is there.
PER_SCORE, PER_CHARACTER = 8.0, 0.3


def score(letters: str, response: str) -> float:
    """Return the true worth of a response, at most 1."""
    found = min(sum(letter in letters for letter in response), len(letters))
    return (found - SURPLUS * (len(response) - found)) / len(letters)


def prefers_first(letters: str, first: str, second: str, chance: random.Random) -> bool:
    """Return an annotator's noisy choice, who likes long responses a little too much."""
    better = score(letters, first) - score(letters, second)
    logit = PER_SCORE * better + PER_CHARACTER * (len(first) - len(second))
    return chance.random() < 1 / (1 + math.exp(-logit))


def true_score(sample: Sample) -> float:
    """Score a response by the rule: a reward function."""
    return score(sample.prompt.removesuffix(">"), sample.response)
