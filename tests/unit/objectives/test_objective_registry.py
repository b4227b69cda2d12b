"""Objectives by name, their defaults and what they refuse."""

from __future__ import annotations

import pytest

from gspo_megatron.errors import ConfigError
from gspo_megatron.objectives import get_objective, objective_names, register


def test_the_objectives_and_their_defaults():
    defaults = {name: dict(get_objective(name).defaults) for name in objective_names()}
    assert defaults["gspo"] == {"clip_low": 3e-4, "clip_high": 4e-4}
    assert defaults["gspo_token"] == {"clip_low": 3e-4, "clip_high": 4e-4}
    assert defaults["grpo"] == {"clip_low": 0.2, "clip_high": 0.27}


def test_ratio_levels():
    levels = {name: get_objective(name).ratio_level for name in ("gspo", "gspo_token", "grpo")}
    assert levels == {"gspo": "sequence", "gspo_token": "sequence", "grpo": "token"}


def test_none_stands_for_the_default():
    parameters = get_objective("gspo").parameters(clip_low=None, clip_high=0.01, tau=None)
    assert parameters == {"clip_low": 3e-4, "clip_high": 0.01}


def test_overrides_reach_the_objective(make_inputs):
    inputs = make_inputs(0, spread=1e-2)
    narrow = get_objective("gspo")(inputs)
    wide = get_objective("gspo")(inputs, clip_low=0.5, clip_high=0.5)
    assert narrow.means["clip/sequence/outside"][0] > 0
    assert wide.means["clip/sequence/outside"][0] == 0


def test_a_parameter_that_nothing_reads_is_refused():
    with pytest.raises(ConfigError, match="objective.dual_clip = 3.0: gspo does not use it"):
        get_objective("gspo").parameters(dual_clip=3.0)


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(ConfigError, match="did you mean gspo"):
        get_objective("gsppo")


def test_a_name_is_taken_once():
    with pytest.raises(AssertionError, match="two objectives"):
        register("gspo", ratio_level="token")(lambda inputs: None)
