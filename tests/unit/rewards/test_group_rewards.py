"""Reward functions that get all responses to a prompt in one call, and the figures that reward
functions return."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from gspo_megatron.config.reward_model import RewardModelSection
from gspo_megatron.config.schema import RewardSection
from gspo_megatron.errors import RewardError
from gspo_megatron.rewards.registry import Reward
from gspo_megatron.rewards.scoring import FAILED, Scorer
from gspo_megatron.types import Reasoned, Sample
from tests.unit.data.corpora import refusal

GROUPS = [0, 2, 0, 2, 2, 5]  # the group of each response; this rank has some of the step's groups


def samples(groups: list[int]) -> list[Sample]:
    return [
        Sample("p", "", f"r{n}", truncated=False, num_tokens=1, group=group)
        for n, group in enumerate(groups)
    ]


def place(group: list[Sample]) -> list[float]:
    """Rewards that rise evenly from 0 for the first response of a group to 1 for the last."""
    assert len({sample.group for sample in group}) == 1
    return [n / (len(group) - 1 or 1) for n in range(len(group))]


async def async_place(group: list[Sample]) -> list[float]:
    await asyncio.sleep(0.01 if group[0].group == 0 else 0)
    return place(group)


def score(
    function: Callable[..., Any], given: Any = (), figures: tuple[str, ...] = (), **section: Any
) -> list[float | None]:
    scorer = Scorer(Reward("mine", function, figures=figures), RewardSection(**section))
    found, _ = scorer.score(samples(GROUPS), given)
    return [None if each is None else float(each.rewards.sum()) for each in found]


@pytest.mark.parametrize("function", [place, async_place])
def test_a_group_is_one_call(function: Callable[..., Any]) -> None:
    assert score(function) == [0.0, 0.0, 1.0, 0.5, 1.0, 0.0]
    given = [None, None, None, 7.0, FAILED, FAILED]  # rewards that episodes bring themselves
    dropping = {"on_failure": "drop_group"}
    assert score(function, given, **dropping) == [0.0, 0.0, 1.0, 7.0, None, None]
    # all rewards are given, so the function is not called
    assert score(function, [1.0] * 6) == [1.0] * 6


def test_a_failed_call_costs_its_group_alone() -> None:
    def broken(group: list[Sample]) -> list[float]:
        if group[0].group == 2:
            raise ConnectionError("away")
        return place(group)

    dropping = {"on_failure": "drop_group", "retries": 0}
    assert score(broken, **dropping) == [0.0, None, 1.0, None, None, 0.0]


def test_one_reward_for_each_response_of_a_group() -> None:
    (line,) = refusal(score, lambda group: [1.0] * 2)
    assert line == (
        "reward 'mine' returned 2 rewards for a group of 3 samples; allowed: a list with one "
        "reward for each, in their order"
    )


def test_figures_are_named_and_finite() -> None:
    def reward(**figures: Any) -> Callable[[Sample], Reasoned]:
        return lambda sample: Reasoned(0.5, "half", figures)

    assert score(reward(seen=0.25), figures=("seen", "other")) == [0.5] * 6
    with pytest.raises(RewardError, match="the figure 'sen'; its attribute `figures` names only: "):
        score(reward(sen=0.25), figures=("seen",))
    for value in (float("nan"), "x", None):
        with pytest.raises(RewardError, match="as figure 'seen'; a finite number is wanted"):
            score(reward(seen=value), figures=("seen",))


def test_a_figure_cannot_have_the_name_of_a_part() -> None:
    model = RewardModelSection(url="http://127.0.0.1:1", tokenizer="t")
    for name in ("model", "exact_match"):
        (line,) = refusal(score, lambda sample: 0.5, figures=(name,), model=model)
        assert f"figure '{name}' has the name of a part" in line and f"reward/{name};" in line
