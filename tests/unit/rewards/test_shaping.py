"""Shaping: scale, then clip, then the punishment of overlong responses."""

from __future__ import annotations

import numpy as np
import pytest

from gspo_megatron.config.schema import RewardSection
from gspo_megatron.rewards.scoring import Shaping
from gspo_megatron.types import Sample

LONGEST, BUFFER = 20, 5


def shaped(rewards: list[float], tokens: int = 1, truncated: bool = False, **keys: object) -> list:
    shaping = Shaping(RewardSection(**keys), LONGEST)
    sample = Sample("p", "a", "r", truncated, num_tokens=tokens)
    given = np.array(rewards)
    result = shaping(given, sample).tolist()
    assert given.tolist() == rewards  # what the reward function returned stays
    return result


def punishment(tokens: int, longest: int, buffer: int) -> float:
    """DAPO, arXiv 2503.14476, equation 13, as it is printed."""
    if tokens <= longest - buffer:
        return 0.0
    if tokens <= longest:
        return ((longest - buffer) - tokens) / buffer
    return -1.0


@pytest.mark.parametrize("buffer", [1, BUFFER, LONGEST - 1])
def test_overlong_responses_lose_what_the_paper_says(buffer: int) -> None:
    for tokens in range(1, LONGEST + 3):
        expected = 0.5 + 2.0 * punishment(tokens, LONGEST, buffer)
        found = shaped([0.5], tokens, overlong_buffer=buffer, overlong_penalty=2.0)
        assert found == [pytest.approx(expected, abs=1e-15)], tokens


def test_a_truncated_response_loses_all_of_it() -> None:
    assert shaped([1.0], 3, truncated=True, overlong_buffer=BUFFER) == [0.0]
    assert shaped([1.0], LONGEST, truncated=True, overlong_buffer=BUFFER) == [0.0]
    assert shaped([1.0], 3, truncated=True) == [1.0]


def test_the_order_is_scale_clip_punishment() -> None:
    keys = {"scale": 4.0, "clip": 1.5}
    assert shaped([0.25, 0.5, -0.5], **keys) == [1.0, 1.5, -1.5]
    assert shaped([-0.5], LONGEST, overlong_buffer=BUFFER, **keys) == [-2.5]
    # the last turn pays for the length
    assert shaped([1.0, 2.0, 3.0], LONGEST, overlong_buffer=BUFFER) == [1.0, 2.0, 2.0]


@pytest.mark.parametrize("keys", [{}, {"scale": 0.5}, {"clip": 1.0}, {"overlong_buffer": 4}])
def test_shaping_is_off_by_default(keys: dict[str, object]) -> None:
    assert Shaping(RewardSection(**keys), LONGEST).is_on is bool(keys)
