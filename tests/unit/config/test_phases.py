"""The phases of a run: the values of each step, and the mistakes that are reported."""

from __future__ import annotations

from typing import Any

import pytest

from gspo_megatron.config import Config, parse_config
from gspo_megatron.config.phases import (
    at_step,
    hidden_overrides,
    is_border,
    later_phases_need_reference,
    may_change,
    phase_configs,
    phase_end,
    phase_number,
    reference_step,
)
from gspo_megatron.config.resume import find_changes
from gspo_megatron.errors import ConfigError

BASE: dict[str, Any] = {
    "checkpoint": {"interval": 5},
    "data": {"tokenizer": "t.model", "prompts": "a.jsonl"},
    "training": {"steps": 10},
}


def campaign(*phases: dict[str, Any], **sections: Any) -> Config:
    training = {**BASE["training"], **sections.pop("training", {}), "phases": list(phases)}
    return parse_config({**BASE, **sections, "training": training})


THREE = (
    {"until_step": 4},
    {"until_step": 7, "rollout": {"max_response_tokens": 99}, "data": {"prompts": ["b.jsonl"]}},
    {"rollout": {"vllm": {"servers": 3}}, "optimizer": {"learning_rate": 3e-6}},
)


def test_each_step_has_the_values_of_its_phase_and_those_before() -> None:
    config = campaign(*THREE, rollout={"vllm": {"weight_update_timeout_seconds": 70}})
    first, second, third = (at_step(config, step) for step in (4, 5, 8))
    assert first == config
    assert (second.rollout.max_response_tokens, second.data.prompts) == (99, ["b.jsonl"])
    assert third.rollout.max_response_tokens == 99  # the same as in the phase before
    assert third.optimizer.learning_rate == 3e-6 != second.optimizer.learning_rate
    # a nested section keeps its other keys
    assert (third.rollout.vllm.servers, third.rollout.vllm.weight_update_timeout_seconds) == (3, 70)
    assert phase_configs(config) == [first, second, third]
    # the values of the third phase are the same if they are computed from the second
    assert at_step(second, 10) == third


def test_borders() -> None:
    config = campaign(*THREE)
    assert [phase_number(config, step) for step in (1, 4, 5, 7, 8, 10, 11)] == [0, 0, 1, 1, 2, 2, 2]
    assert [phase_end(config, step) for step in (1, 4, 5, 8, 10)] == [4, 4, 7, 10, 10]
    assert [step for step in range(12) if is_border(config, step)] == [4, 7]
    plain = campaign()
    assert phase_end(plain, 3) == 10 and phase_configs(plain) == [plain]
    assert not any(is_border(plain, step) for step in range(12))
    shorter = campaign(*THREE[:2], {}, training={"steps": 8})
    assert phase_end(shorter, 8) == 8


def test_the_reference_is_that_of_the_last_phase_that_renewed_it() -> None:
    renewed = ({"until_step": 4}, {"until_step": 7, "reference": "renew"}, {})
    config = campaign(*renewed)
    assert [reference_step(config, step) for step in (1, 4, 5, 7, 8, 10)] == [0, 0, 4, 4, 4, 4]
    kl = {"objective": {"kl": "k3", "kl_coefficient": 0.1}}
    assert later_phases_need_reference(campaign({"until_step": 4}, kl), 1)
    own = {"objective": {"import_path": "mine:loss"}}  # it may need the reference, too
    assert later_phases_need_reference(campaign({"until_step": 4}, own), 1)
    # The reference is saved if a phase renews it.
    for changed in (kl, own):
        renews = campaign({"until_step": 4}, changed | {"reference": "renew"})
        assert not later_phases_need_reference(renews, 1)
    assert not later_phases_need_reference(config, 1)


@pytest.mark.parametrize(
    ("phases", "line"),
    [
        ([{}, {}], "training.phases[0].until_step = null: another phase follows"),
        ([{"until_step": 5}, {"until_step": 5}], "phases[1].until_step = 5: not after step 5"),
        ([{"until_step": 5}, {"until_step": 3}], "phases[1].until_step = 3: not after step 5"),
        ([{"until_step": 5}, {"until_step": 9}], "the run ends at training.steps = 10"),
        ([{"until_step": 10}, {}], "nothing is left of training.steps = 10 for the next phase"),
        ([{"until_step": 12}, {}], "nothing is left of training.steps = 10 for the next phase"),
        ([{"until_step": 0}, {}], "training.phases[0].until_step = 0"),
        ([{"until_step": "5"}, {}], "training.phases[0].until_step = '5'"),
        ([{"reference": "renew"}], "training.phases[0].reference = 'renew': the first phase"),
        ([{"reference": "new"}], "training.phases[0].reference = 'new'"),
        ([{"model": {"preset": "tiny"}}], "training.phases[0].model"),
        (
            [{"routing": {"reference_replay": "r2"}}],
            "training.phases[0].routing: stays the same for a whole run; set routing",
        ),
        ([{"training": {"seed": 2}}], "training.phases[0].training: stays the same for a whole"),
        ([{"rollout": 8}], "training.phases[0].rollout = 8: must be a mapping"),
        ([{"rollout": {"engine": "vllm"}}], "phases[0].rollout.engine: stays the same for a whole"),
        (
            [{"data": {"tokenizer": "x"}}],
            "phases[0].data.tokenizer: stays the same for a whole run",
        ),
        ([{"optimizer": {"megatron": {}}}], "optimizer.megatron: stays the same for a whole"),
        (
            [{"rollout": {"max_tokens": 8}}],
            "phases[0]: rollout.max_tokens = 8: unknown key",
        ),
        ([{"rollout": {"group_size": 0}}], "training.phases[0]: rollout.group_size = 0"),
        ([{"objective": {"name": "gsp"}}], "training.phases[0]: objective.name = 'gsp'"),
        ([{"objective": {"clip_low": "x"}}], "training.phases[0]: objective.clip_low = 'x'"),
        ([8], "training.phases[0] = 8: must be a mapping"),
        (8, "training.phases = 8"),
    ],
)
def test_wrong_phases_are_named(phases: Any, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config({**BASE, "training": {"steps": 10, "phases": phases}})
    [told] = caught.value.problems
    assert line in told and "\n" not in told


def test_phases_need_checkpoints_and_adapters_have_one_reference() -> None:
    with pytest.raises(ConfigError, match="checkpoint.interval = 0: a phase begins with a check"):
        campaign({"until_step": 4}, {}, checkpoint={"interval": 0})
    lora = {"lora": {"rank": 4}, "hf_path": "base"}
    with pytest.raises(ConfigError, match="model.lora the reference is the model without its ad"):
        campaign({"until_step": 4}, {"reference": "renew"}, model=lora)


def test_a_mistake_is_told_once_and_all_are() -> None:
    """A phase keeps the values of the phase before. So a mistake in a value is also in all later
    phases."""
    wrong = {"until_step": 5, "rollout": {"group_size": 0}}
    more = {"until_step": 7, "rollout": {"temperature": -1.0}}
    with pytest.raises(ConfigError) as caught:
        campaign(wrong, more, {})
    first, second = caught.value.problems
    assert first.startswith("training.phases[0]: rollout.group_size = 0")
    assert second.startswith("training.phases[1]: rollout.temperature = -1.0")


def test_what_may_change() -> None:
    allowed = "data.prompts rollout.group_size objective.clip_low optimizer.learning_rate"
    assert all(map(may_change, f"{allowed} evaluation.suites.a.reward.name".split()))
    fixed = "data.tokenizer rollout.engine optimizer.megatron.lr model.preset training.seed"
    assert not any(map(may_change, f"{fixed} parallel.tp routing.replay".split()))


def test_a_change_that_is_asked_for_is_no_refusal() -> None:
    before = campaign().model_dump()
    values = {"rollout": {"temperature": 0.5}, "training": {"seed": 2}}
    now = parse_config({**BASE, **values, "training": {"steps": 10, "seed": 2}})
    plain, asked = (find_changes(before, now, {}, change=change) for change in (False, True))
    assert [line.split(" ")[0] for line in plain.refused] == [
        "rollout.temperature",
        "training.seed",
    ]
    assert [line.split(" ")[0] for line in asked.refused] == ["training.seed"]
    assert (plain.asked, asked.asked) == ([], ["rollout.temperature: 1.0 -> 0.5"])
    fingerprint = {"data.prompts": False}  # the file has the same name but other contents
    changes = find_changes(before, campaign(), fingerprint, change=True)
    assert not changes.refused and changes.asked == ["data.prompts: its contents"]


WAIT = "weight_update_timeout_seconds"
HIDING = {"until_step": 7, "rollout": {"max_response_tokens": 99, "vllm": {WAIT: 70}}}


@pytest.mark.parametrize(
    ("override", "step", "named"),
    [
        ("rollout.max_response_tokens=50", 5, "rollout.max_response_tokens"),
        ("rollout.max_response_tokens=50", 8, "rollout.max_response_tokens"),
        # the old name of a key that the phase sets by its new name
        ("rollout.vllm.update_seconds=9", 5, f"rollout.vllm.{WAIT}"),
        ("rollout.max_response_tokens=50", 4, None),  # the phase begins after this step
        ("rollout.max_response_tokens=99", 5, None),  # the same value
        ("rollout.group_size=4", 5, None),  # no phase changes this key
    ],
)
def test_an_override_that_a_phase_replaces_is_named(
    override: str, step: int, named: str | None
) -> None:
    training = {"steps": 10, "phases": [{"until_step": 4}, HIDING, {}]}
    values = {**BASE, "training": training}
    told = hidden_overrides(parse_config(values, [override]), [override], step)
    assert len(told) == (named is not None)
    assert named is None or told[0].startswith(
        f"{named}: training.phases sets another value for step {step}; change it there, or "
    )
    words = [override, "training.phases=[]"]
    assert hidden_overrides(parse_config(values, words), words, step) == []
