"""Every setting arrives in Megatron-Core's TransformerConfig; none is dropped."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import TransformerConfig

from gspo_megatron.config import resolve_parallel
from gspo_megatron.config.model_shape import PRESETS
from gspo_megatron.models import transformer_config as module
from gspo_megatron.models.transformer_config import transformer_config
from tests.unit.models.one_rank import tiny_config

KNOWN = {field.name for field in dataclasses.fields(TransformerConfig)}
# Younger than the oldest Megatron-Core that is supported.
OPTIONAL = {"embedding_init_method"}


def convert(**sections: Any) -> TransformerConfig:
    config = tiny_config(**sections)
    return transformer_config(config, resolve_parallel(config, 1))


def names_set_by_the_module() -> set[str]:
    """The string keys of all dictionaries that its functions write down."""
    tree = ast.parse(inspect.getsource(module))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    keys = [
        key.value
        for function in functions
        for node in ast.walk(function)
        if isinstance(node, ast.Dict)
        for key in node.keys
        if isinstance(key, ast.Constant)
    ]
    assert {"bf16", "variable_seq_lengths", "recompute_granularity"} <= set(keys)
    return set(keys)


def test_every_name_that_the_module_sets_is_known_to_megatron_core() -> None:
    assert names_set_by_the_module() - OPTIONAL - KNOWN == set()


def test_every_name_of_presets_and_layout_is_known_to_megatron_core() -> None:
    for name, preset in PRESETS.items():
        assert set(preset.megatron) - KNOWN == set(), name
    sizes = resolve_parallel(tiny_config(), 1).group_sizes()
    assert set(sizes) - KNOWN == set()


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_arrive_key_by_key(preset: str) -> None:
    config = convert(model={"preset": preset})
    expected = dict(PRESETS[preset].megatron) | {"num_layers": 2, "moe_aux_loss_coeff": 0.0}
    for name, value in expected.items():
        wanted = F.silu if name == "activation_func" else value
        assert getattr(config, name) == wanted, name


def test_a_users_own_keys_win_over_preset_and_module() -> None:
    own = {
        "hidden_size": 32,
        "num_attention_heads": 2,
        "kv_channels": 12,
        "moe_router_topk": 3,
        "moe_z_loss_coeff": 1e-4,
        "layernorm_zero_centered_gamma": True,
        "activation_func": "gelu",
        "attention_backend": "unfused",
        "bias_dropout_fusion": True,
        "moe_router_load_balancing_type": "seq_aux_loss",
    }
    config = convert(model={"megatron": own})
    special = {"activation_func": F.gelu, "attention_backend": AttnBackend.unfused}
    for name, value in own.items():
        assert getattr(config, name) == special.get(name, value), name


@pytest.mark.parametrize(("precision", "dtype"), module.DTYPES.items())
def test_precision(precision: str, dtype: torch.dtype) -> None:
    config = convert(training={"precision": precision})
    assert config.params_dtype is config.pipeline_dtype is dtype
    assert config.bf16 == (precision == "bf16") and not config.fp16


def test_the_layout_arrives() -> None:
    config = tiny_config(
        parallel={"layout": "tp=2,pp=2,vpp=1,ep=2,cp=2,dp=1"},
        model={"megatron": {"num_layers": 4}},
    )
    parallel = resolve_parallel(config, 8)
    converted = transformer_config(config, parallel)
    for name, value in parallel.group_sizes().items():
        assert getattr(converted, name) == value, name
    assert converted.sequence_parallel is True


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("none", (None, None, None)), ("full", ("full", "uniform", 1)), ("selective", ("selective",))],
)
def test_recompute(mode: str, expected: tuple) -> None:
    config = convert(training={"recompute": mode})
    names = ("recompute_granularity", "recompute_method", "recompute_num_layers")
    assert tuple(getattr(config, name) for name in names[: len(expected)]) == expected


def test_megatron_draws_no_weights_itself() -> None:
    config = convert()
    weight = torch.full((2, 3), 5.0)
    for method in (config.init_method, config.output_layer_init_method):
        assert torch.equal(method(weight), torch.full((2, 3), 5.0))
    assert config.perform_initialization is True  # or TP shards would lose their marks


def test_a_dense_model_has_no_grouped_experts() -> None:
    dense = convert(model={"megatron": {"num_moe_experts": None}})
    assert dense.num_moe_experts is None and dense.moe_grouped_gemm is False


def test_experts_are_grouped() -> None:
    assert convert().moe_grouped_gemm is True
