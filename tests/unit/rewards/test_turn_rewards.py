"""Rewards of turns: what is taken, and what each mistake is told."""

from __future__ import annotations

import numpy as np
import pytest

from gspo_megatron.errors import RewardError
from gspo_megatron.rewards import Reward, score
from gspo_megatron.types import Sample, TurnRewards

SAMPLE = Sample("ab>", "ba", "b\nb", truncated=False, num_tokens=7)
SHOWN = r"prompt 'ab>', response 'b\nb'"


def scored(rewards: object, ends: object, sample: Sample = SAMPLE) -> float | TurnRewards:
    return score(Reward("mine", lambda sample: TurnRewards(rewards, ends)), sample)


@pytest.mark.parametrize(
    ("rewards", "ends"),
    [
        ([0.5, -1], [3, 7]),
        ((True, 2), (1, 7)),
        ([1.0], [7]),
        (np.array([1, 2], dtype=np.float32), np.array([6, 7], dtype=np.int32)),
        ([0.25] * 7, range(1, 8)),  # a turn for each token
    ],
)
def test_turns_come_back_as_arrays(rewards: object, ends: object) -> None:
    found = scored(rewards, ends)
    assert isinstance(found, TurnRewards)
    assert found.rewards.dtype == np.float64
    assert found.rewards.tolist() == [float(r) for r in rewards]
    assert found.ends.dtype == np.int64
    assert found.ends.tolist() == list(ends)


@pytest.mark.parametrize(
    ("rewards", "ends", "expected"),
    [
        ([1.0, float("nan")], [3, 7], "nan for turn 1; finite numbers are wanted"),
        ([float("-inf"), 1.0], [3, 7], "-inf for turn 0; finite numbers are wanted"),
        ([1e308, 1e308], [3, 7], "turns whose rewards add up to inf; a finite sum is wanted"),
        ([1.0], [3, 7], "turns with 1 rewards and 2 ends; one of each is wanted"),
        ([1.0, 1.0], [7, 7], "end 7 for turn 1; above 7, where it starts, is wanted"),
        ([1.0, 1.0, 0], [4, 2, 7], "end 2 for turn 1; above 4, where it starts, is wanted"),
        ([1.0, 1.0], [0, 7], "end 0 for turn 0; above 0, where it starts, is wanted"),
        ([1.0], [-1], "end -1 for turn 0; above 0, where it starts, is wanted"),
        ([1.0, 1.0], [3, 6], "6 as the last end; turns up to the end of the response's 7 tokens"),
        ([1.0, 1.0], [3, 8], "8 as the last end; turns up to the end of the response's 7 tokens"),
        ([], [], "no turns; turns up to the end of the response's 7 tokens are wanted"),
        (["1.0"], [7], "['1.0'] as rewards of turns; a list of numbers is wanted"),
        ([None], [7], "[None] as rewards of turns; a list of numbers is wanted"),
        ([[1.0], [1.0, 2.0]], [3, 7], "as rewards of turns; a list of numbers is wanted"),
        (1.0, [7], "1.0 as rewards of turns; a list of numbers is wanted"),
        ([1.0], [7.0], "[7.0] as ends of turns; a list of integers is wanted"),
        ([1.0], [True], "[True] as ends of turns; a list of integers is wanted"),
        ([1.0], 7, "7 as ends of turns; a list of integers is wanted"),
    ],
)
def test_mistakes_are_named_with_reward_prompt_and_response(
    rewards: object, ends: object, expected: str
) -> None:
    with pytest.raises(RewardError) as caught:
        scored(rewards, ends)
    message = str(caught.value)
    assert message.startswith("reward 'mine' returned ")
    assert expected in message
    assert message.endswith(SHOWN)
