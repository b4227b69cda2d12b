"""The config.json that goes with exported weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gspo_megatron.checkpoint.hf.config import export_config
from gspo_megatron.config.families import describe
from gspo_megatron.config.model_shape import ModelShape, shape_of
from gspo_megatron.errors import ConfigError
from tests.unit.checkpoint.hf.published import CONFIGS, VOCABULARY, model_config


def _shape(hf: dict[str, Any], **megatron: Any) -> ModelShape:
    return shape_of(describe(hf), megatron)


@pytest.mark.parametrize("family", CONFIGS)
def test_without_an_original_it_describes_the_same_model(family: str) -> None:
    shape = _shape(model_config(family))
    made = export_config(shape, VOCABULARY, "BF16")
    assert shape_of(describe(made)) == shape
    assert made["torch_dtype"] == "bfloat16"
    assert made["architectures"] == CONFIGS[family]["architectures"]


@pytest.mark.parametrize("family", CONFIGS)
def test_the_original_is_kept_as_it_is(family: str) -> None:
    original = model_config(family) | {"bos_token_id": 3, "somebodys_key": [1, 2]}
    made = export_config(_shape(original), VOCABULARY, "F32", original)
    assert made == original


def test_what_has_changed_is_changed_in_the_original() -> None:
    original = model_config("qwen3_moe") | {"bos_token_id": 3, "decoder_sparse_step": 2}
    del original["rope_theta"], original["rope_scaling"], original["torch_dtype"]
    original |= {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}}
    original |= {"dtype": "float32"}
    shape = replace(_shape(original, moe_aux_loss_coeff=0.5), rotary_base=700.0)
    made = export_config(shape, VOCABULARY, "BF16", original)
    assert made["router_aux_loss_coef"] == 0.5
    assert made["rope_theta"] == 700.0 and "rope_parameters" not in made
    assert made["dtype"] == "bfloat16" and "torch_dtype" not in made
    assert made["bos_token_id"] == 3
    assert shape_of(describe(made)) == shape


def test_a_model_that_is_no_more_of_the_family_is_refused() -> None:
    original = model_config("mixtral")
    shape = _shape(original, moe_router_pre_softmax=True)
    with pytest.raises(ConfigError, match="mixtral"):
        export_config(shape, VOCABULARY, "F32", original)
