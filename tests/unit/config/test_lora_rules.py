"""What model.lora and other keys must satisfy together."""

from __future__ import annotations

import pytest

from gspo_megatron.config.lora import LoraSection
from gspo_megatron.errors import ConfigError
from tests.unit.config.configs import config_with, problems_of


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["model.lora.checkpoint=somewhere"], "there are no adapters with model.lora.rank = 0"),
        (["model.lora.rank=4", "model.lora.targets=q_porj"], "no such matrices"),
        (
            ["model.lora.rank=4", "model.lora.targets=[attention, mlp]"],
            "model.lora.targets = 'mlp'",
        ),
        (["model.lora.rank=4", "parallel.layout=tp=4"], "need whole query groups on each rank"),
        (
            ["model.lora.rank=4", "model.megatron.moe_router_bias_update_rate=0.001"],
            "routers of a frozen model stay as they are",
        ),
        (
            ["model.lora.rank=4", "model.megatron.moe_shared_expert_intermediate_size=32"],
            "no Hugging Face family has such models",
        ),
        (["model.lora.rank=-1"], "model.lora.rank"),
        (["model.lora.rank=4", "model.lora.alpha=0"], "model.lora.alpha"),
    ],
)
def test_what_does_not_fit_is_told(overrides: list[str], told: str) -> None:
    try:
        lines = problems_of(4, *overrides)
    except ConfigError as error:  # of the value alone
        lines = error.problems
    assert any(told in line for line in lines), lines


def test_the_frozen_weights_of_a_run_are_not_random() -> None:
    lines = problems_of(1, "model.lora.rank=4", for_training=True)
    assert any("the frozen weights would be random" in line for line in lines)
    assert not problems_of(1, "model.lora.rank=4")  # for verify and estimates


def test_other_targets_take_more_tensor_parallelism() -> None:
    assert not problems_of(
        4, "model.lora.rank=4", "parallel.layout=tp=4", "model.lora.targets=o_proj"
    )


def test_the_scale_and_one_target_or_several() -> None:
    assert LoraSection(rank=16).scale == 1.0
    assert LoraSection(rank=16, alpha=32.0).scale == 2.0
    assert LoraSection(rank=16, alpha=32.0, use_rslora=True).scale == 8.0
    section = config_with("model.lora.targets=attention").model.lora
    assert section.targets == ["attention"]
    assert section.model_dump()["targets"] == "attention"
