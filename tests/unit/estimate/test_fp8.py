"""What FP8 adds to the estimate: two copies of the weights that it multiplies by."""

from __future__ import annotations

import pytest

from gspo_megatron.config.precision import FP8
from gspo_megatron.estimate.layout import estimate_layout
from gspo_megatron.estimate.memory import RankMemory, by_component
from tests.unit.estimate.conftest import ConfigMaker

HIDDEN, HEADS, GROUPS, CHANNELS, FFN, LAYERS = 64, 4, 2, 16, 64, 4
TP, EP = 2, 2
# qkv and output projection over tp; 8 experts of gate, up and down over ep
WEIGHTS = LAYERS * (HIDDEN * CHANNELS * (2 * HEADS + 2 * GROUPS) // TP + 8 // EP * 3 * HIDDEN * FFN)


def worst(make_config: ConfigMaker, precision: str, **megatron: object) -> RankMemory:
    config = make_config(
        "tiny",
        f"tp={TP},ep={EP}",
        model={"vocab_size": 99, "megatron": megatron},
        training={"precision": precision},
    )
    return estimate_layout(config, 2, 99).worst


@pytest.mark.parametrize("precision", list(FP8))
def test_fp8_adds_two_copies_of_the_weights_and_nothing_else(
    make_config: ConfigMaker, precision: str
) -> None:
    plain, found = worst(make_config, "bf16"), worst(make_config, precision)
    assert (plain.fp8_copies, found.fp8_copies) == (0, 2 * WEIGHTS)
    assert found.state == plain.state
    assert found.total == plain.total + 2 * WEIGHTS
    assert by_component(found)["FP8 copies of weights"] == 2 * WEIGHTS


def test_unless_they_are_made_anew_each_time(make_config: ConfigMaker) -> None:
    found = worst(make_config, "mxfp8", disable_parameter_transpose_cache=True)
    assert found.fp8_copies == 0


def test_fields_of_fp8_alone_do_not_keep_the_model_from_being_built(
    make_config: ConfigMaker,
) -> None:
    megatron = {"moe_router_padding_for_quantization": True, "fp8_margin": 1}
    assert worst(make_config, "mxfp8", **megatron).fp8_copies == 2 * WEIGHTS
