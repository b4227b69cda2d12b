"""Mistakes in data.selection. Each mistake gives one line of the error."""

from __future__ import annotations

import pytest

from tests.unit.config.configs import problems_of

BY = "data.selection.by=pass_rate"
UNREAD = "nothing reads it with data.selection"


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["low=0.2"], f"low = 0.2: {UNREAD}.by = uniform; allowed: 0.01"),
        (["high=0.5"], f"high = 0.5: {UNREAD}.by = uniform; allowed: 0.99"),
        (["floor=0.0"], f"floor = 0.0: {UNREAD}.by = uniform; allowed: 0.1"),
        (["retire_after=2"], f"retire_after = 2: {UNREAD}.by = uniform; allowed: null"),
        (
            ["by=pass_rate", "revive_after=2"],
            f"revive_after = 2: {UNREAD}.retire_after = null; allowed: null",
        ),
        (["by=pass_rate", "low=0.6", "high=0.5"], "low = 0.6: above high; allowed: at most 0.5"),
    ],
)
def test_keys_that_do_not_fit_each_other(overrides: list[str], told: str) -> None:
    assert problems_of(1, *(f"data.selection.{each}" for each in overrides)) == [
        f"data.selection.{told}"
    ]


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("data.weights=[2.0]", f"data.weights = [2.0]: {UNREAD}.by = pass_rate; allowed: null"),
        ("data.shuffle=false", f"data.shuffle = false: {UNREAD}.by = pass_rate; allowed: true"),
    ],
)
def test_other_orders_of_prompts_are_refused(override: str, told: str) -> None:
    assert problems_of(1, override) == []
    assert problems_of(1, override, BY) == [told]


def test_a_run_without_rewards_has_no_pass_rates() -> None:
    told = (
        "data.selection.by = 'pass_rate': with reward none no response is solved; allowed: uniform"
    )
    teacher = "objective.distillation.url=http://127.0.0.1:1"
    assert told in problems_of(1, BY, "reward.name=none", teacher)


def test_a_sound_section_has_no_problems() -> None:
    words = "low=0.0, high=1.0, floor=0.0, retire_after=1, revive_after=1, correct_at=0.5"
    assert problems_of(1, BY, *(f"data.selection.{each}" for each in words.split(", "))) == []
    # This key is legal without a selection, too, because it concerns statistics that every run has.
    assert problems_of(1, "data.selection.correct_at=0.5") == []
