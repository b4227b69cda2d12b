"""Shaping: scale, then clip, then the punishment of overlong responses."""

from __future__ import annotations

import numpy as np
import pytest

from gspo_megatron.config import check_config, parse_config
from gspo_megatron.config.schema import RewardSection
from gspo_megatron.errors import ConfigError
from gspo_megatron.rewards.shaping import Shaping
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


@pytest.mark.parametrize("tokens", range(1, LONGEST + 3))
@pytest.mark.parametrize("buffer", [1, BUFFER, LONGEST - 1])
def test_overlong_responses_lose_what_the_paper_says(tokens: int, buffer: int) -> None:
    expected = 0.5 + 2.0 * punishment(tokens, LONGEST, buffer)
    found = shaped([0.5], tokens, overlong_buffer=buffer, overlong_penalty=2.0)
    assert found == [pytest.approx(expected, abs=1e-15)]


def test_a_truncated_response_loses_all_of_it() -> None:
    assert shaped([1.0], 3, truncated=True, overlong_buffer=BUFFER) == [0.0]
    assert shaped([1.0], LONGEST, truncated=True, overlong_buffer=BUFFER) == [0.0]
    assert shaped([1.0], 3, truncated=True) == [1.0]


def test_the_order_is_scale_clip_punishment() -> None:
    keys = {"scale": 4.0, "clip": 1.5}
    assert shaped([0.25, 0.5, -0.5], **keys) == [1.0, 1.5, -1.5]
    assert shaped([-0.5], LONGEST, overlong_buffer=BUFFER, **keys) == [-2.5]


def test_the_last_turn_pays_for_the_length() -> None:
    assert shaped([1.0, 2.0, 3.0], LONGEST, overlong_buffer=BUFFER) == [1.0, 2.0, 2.0]


@pytest.mark.parametrize("keys", [{}, {"scale": 0.5}, {"clip": 1.0}, {"overlong_buffer": 4}])
def test_shaping_is_off_by_default(keys: dict[str, object]) -> None:
    assert Shaping(RewardSection(**keys), LONGEST).is_on is bool(keys)


def problems_of(*overrides: str) -> list[str]:
    try:
        check_config(parse_config({"data": {"tokenizer": "t"}}, overrides), 1)
    except ConfigError as error:
        return error.problems
    return []


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["reward.overlong_buffer=31", "reward.overlong_penalty=0.5"], None),
        (["reward.scale=2", "reward.clip=3"], None),
        (["rollout.dynamic_sampling=true", "rollout.max_refills=0"], None),
        (
            ["reward.overlong_buffer=32"],
            "reward.overlong_buffer = 32: leaves no response of max_response_tokens = 32 "
            "without a penalty; legal: null, or below 32",
        ),
        (
            ["reward.overlong_penalty=0.5"],
            "reward.overlong_penalty = 0.5: nothing reads it without reward.overlong_buffer; "
            "legal: 1.0",
        ),
        (
            ["rollout.max_refills=7"],
            "rollout.max_refills = 7: nothing reads it without rollout.dynamic_sampling; legal: 4",
        ),
        (["reward.scale=0"], "reward.scale"),
        (["reward.clip=0"], "reward.clip"),
        (["reward.overlong_buffer=0"], "reward.overlong_buffer"),
        (["reward.overlong_penalty=0"], "reward.overlong_penalty"),
        (["rollout.max_refills=-1"], "rollout.max_refills"),
    ],
)
def test_keys_that_do_not_fit_each_other_or_their_range(
    overrides: list[str], expected: str | None
) -> None:
    problems = problems_of(*overrides)
    assert len(problems) == (expected is not None)
    assert expected is None or problems[0].startswith(expected)
