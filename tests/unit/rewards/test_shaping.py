"""The shaping of rewards: first the scale, then the clip, then the penalty for overlong
responses."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from gspo_megatron.config.schema import RewardSection
from gspo_megatron.rewards.scoring import Shaping
from gspo_megatron.types import Sample

LONGEST, BUFFER = 20, 5


def shaped(
    rewards: list[float],
    tokens: int = 1,
    truncated: bool = False,
    text: str = "r",
    written: str = "",
    **keys: object,
) -> list:
    shaping = Shaping(RewardSection(**keys), LONGEST)
    sample = Sample("p", "a", text, truncated, num_tokens=tokens, written=written)
    given = np.array(rewards)
    result = shaping(given, sample).tolist()
    assert given.tolist() == rewards  # shaping does not change the given array
    return result


def punishment(tokens: int, longest: int, buffer: int) -> float:
    """The length penalty of DAPO, as printed in arXiv 2503.14476, equation 13."""
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
    # The penalty for the length is subtracted from the reward of the last turn.
    assert shaped([1.0, 2.0, 3.0], LONGEST, overlong_buffer=BUFFER) == [1.0, 2.0, 2.0]


def repetition(text: str, size: int) -> float:
    """The share of sequences of `size` words that repeat an earlier sequence. It is the penalty in
    appendix C.2 of arXiv 2502.03373."""
    words = text.lower().split()
    counts = Counter(" ".join(words[n : n + size]) for n in range(len(words) - size + 1))
    return sum(count - 1 for count in counts.values()) / max(counts.total(), 1)


LOOPS = "To be or not to be or not to be Or not"


@pytest.mark.parametrize("size", [1, 2, 3, 11, 12])
@pytest.mark.parametrize("text", ["", "one", "one two three", "a a a a", LOOPS, "a b\n a  b"])
def test_responses_that_repeat_themselves_lose_their_share(text: str, size: int) -> None:
    keys = {"repetition_penalty": 2.0, "repetition_words": size}
    expected = 0.5 - 2.0 * repetition(text, size)
    assert shaped([0.5], text=text, **keys) == [pytest.approx(expected, abs=1e-15)]
    # The penalty counts the repetitions in all turns of an episode, and is subtracted from the
    # reward of the last turn.
    found = shaped([0.5, 0.25], text="one", written=text, **keys)
    other = repetition(text or "one", size)
    assert found == [0.5, pytest.approx(0.25 - 2.0 * other, abs=1e-15)]


@pytest.mark.parametrize("size", [1, 3])
def test_the_penalty_is_that_of_trl(size: int) -> None:
    rewards = pytest.importorskip("trl.rewards")
    theirs = rewards.get_repetition_penalty_reward(ngram_size=size, max_penalty=-0.5)
    for text in ("one", "one two three", "a a a a", LOOPS):
        # TRL counts tokens and we count words, so TRL gets words as tokens.
        [expected] = theirs(completions=[text], completion_ids=[text.lower().split()])
        found = shaped([0.0], text=text, repetition_penalty=0.5, repetition_words=size)
        assert found == [pytest.approx(expected, abs=1e-15)]


KEYS = [{"scale": 0.5}, {"clip": 1.0}, {"overlong_buffer": 4}, {"repetition_penalty": 0.5}]


@pytest.mark.parametrize("keys", [{}, *KEYS])
def test_shaping_is_off_by_default(keys: dict[str, object]) -> None:
    assert Shaping(RewardSection(**keys), LONGEST).is_on is bool(keys)
