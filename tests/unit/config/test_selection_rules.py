"""Mistakes in data.selection. Each mistake gives one line of the error."""

from __future__ import annotations

import pytest

from gspo_megatron.config import parse_config
from gspo_megatron.config.phases import at_step
from gspo_megatron.config.resume import find_changes
from gspo_megatron.errors import ConfigError
from tests.unit.config.configs import config_with, problems_of

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


def test_all_mistakes_are_told_at_once() -> None:
    words = [BY, "data.selection.low=0.9", "data.selection.high=0.1", "data.shuffle=false"]
    assert len(problems_of(1, *words, "data.selection.revive_after=3")) == 3


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("floor=1.5", "data.selection.floor = 1.5: must be less than or equal to 1"),
        ("low=-0.5", "data.selection.low = -0.5: must be greater than or equal to 0"),
        ("by=rate", "data.selection.by = 'rate': unknown value"),
        ("retire_after=0", "data.selection.retire_after = 0: must be greater than or equal to 1"),
        ("band=0.5", "data.selection.band = 0.5: unknown key"),
    ],
)
def test_values_out_of_range(override: str, told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config_with(f"data.selection.{override}")
    (line,) = refused.value.problems
    assert line.startswith(told), line


def test_a_sound_section_has_no_problems() -> None:
    words = [
        "low=0.0",
        "high=1.0",
        "floor=0.0",
        "retire_after=1",
        "revive_after=1",
        "correct_at=0.5",
    ]
    assert problems_of(1, BY, *(f"data.selection.{each}" for each in words)) == []
    # This key is legal without a selection, too, because it concerns statistics that every run has.
    assert problems_of(1, "data.selection.correct_at=0.5") == []


def test_a_resumed_run_keeps_its_selection_and_a_phase_may_change_it() -> None:
    config = config_with(BY)
    changes = find_changes(config_with().model_dump(), config, {})
    assert changes.refused == ["data.selection.by = 'pass_rate': was 'uniform'"]
    assert find_changes(config_with().model_dump(), config, {}, change=True).refused == []
    # a configuration from a version without this section
    before = config.model_dump()
    del before["data"]["selection"]
    assert find_changes(before, config_with(), {}).refused == []
    values = {"data": {"tokenizer": "t", "selection": {"by": "pass_rate", "low": 0.1}}}
    values["training"] = {
        "steps": 9,
        "phases": [{"until_step": 3}, {"data": {"selection": {"high": 0.5}}}],
    }
    config = parse_config(values | {"checkpoint": {"interval": 1}})
    assert at_step(config, 3).data.selection.high == 0.99
    later = at_step(config, 4).data.selection
    assert (later.by, later.low, later.high) == ("pass_rate", 0.1, 0.5)
