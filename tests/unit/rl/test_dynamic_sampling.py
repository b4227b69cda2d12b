"""Dynamic sampling: the groups that are trained, and the need for more prompts."""

from __future__ import annotations

import pytest

from gspo_megatron.rl.rollouts import DynamicSampling

YES, NO = True, False


def selection(*rounds: list[bool], max_refills: int = 2) -> DynamicSampling:
    """The selection after these rounds. It must have asked for each round."""
    chosen = DynamicSampling(len(rounds[0]), max_refills)
    for has_spread in rounds:
        assert chosen.wants_more
        chosen.add(has_spread)
    return chosen


@pytest.mark.parametrize(
    ("rounds", "wants_more", "groups", "metrics"),
    [
        ([[YES, YES, YES]], False, [0, 1, 2], (0, 0, 0)),
        ([[NO, YES, NO]], True, [1], (0, 2, 0)),
        ([[NO, YES, NO], [NO, YES, YES]], False, [1, 4, 5], (1, 3, 0)),
        # There are more groups than needed, so the last ones are dropped.
        ([[NO, YES, YES], [YES, YES, NO]], False, [1, 2, 3], (1, 3, 0)),
        ([[NO, YES, NO], [NO, NO, NO], [NO, NO, YES]], False, [1, 8], (2, 7, 0)),
        # No group has a spread. The first round is used, but only after all refills.
        ([[NO, NO, NO], [NO, NO, NO]], True, [0, 1, 2], (1, 3, 1)),
        ([[NO, NO, NO]] * 3, False, [0, 1, 2], (2, 6, 1)),
    ],
)
def test_groups_with_spread_are_taken_in_order(
    rounds: list[list[bool]], wants_more: bool, groups: list[int], metrics: tuple[int, int, int]
) -> None:
    chosen = selection(*rounds)
    assert chosen.wants_more is wants_more
    assert chosen.groups() == groups
    names = ("rollout/refills", "rollout/groups_dropped", "rollout/no_spread")
    assert chosen.metrics() == dict(zip(names, metrics, strict=True))


def test_without_refills_groups_are_dropped_all_the_same() -> None:
    chosen = selection([YES, NO], max_refills=0)
    assert not chosen.wants_more
    assert chosen.groups() == [0]


def test_switched_off_it_takes_one_draw_whole() -> None:
    chosen = DynamicSampling(2, 3, enabled=False)
    assert chosen.wants_more
    chosen.add([NO, YES])
    assert not chosen.wants_more
    assert chosen.groups() == chosen.candidates(0) == [0, 1]
    assert chosen.metrics() == {}


def test_groups_without_spread_take_the_place_of_failed_groups() -> None:
    """All calls for the first prompts have failed, and no group of the refill has a spread."""
    chosen = DynamicSampling(2, 1)
    chosen.add([NO, NO], has_failed=[YES, YES])
    assert chosen.wants_more and chosen.candidates(0) == []
    chosen.add([NO, NO], has_failed=[YES, NO])
    assert not chosen.wants_more
    assert chosen.groups() == chosen.candidates(2) == [3]
    assert chosen.metrics()["rollout/no_spread"] == 1


def test_further_draws_keep_only_groups_that_may_be_chosen() -> None:
    chosen = selection([NO, YES, NO])
    assert chosen.candidates(0) == [0, 1, 2]
    chosen.add([NO, YES, NO])
    assert chosen.candidates(3) == [4]
