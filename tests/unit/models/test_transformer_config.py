"""Every setting reaches Megatron-Core's TransformerConfig, and impossible settings are refused."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import TransformerConfig

from gspo_megatron.config import resolve_parallel
from gspo_megatron.config.precision import FP8
from gspo_megatron.config.schema import OptimizerSection
from gspo_megatron.errors import UserError
from gspo_megatron.families import PRESETS
from gspo_megatron.models import transformer_config as module
from gspo_megatron.models.build import build_policy, ddp_config
from gspo_megatron.models.optimizer import Schedule, build_trainer
from gspo_megatron.models.specs import block_spec
from gspo_megatron.models.transformer_config import (
    refuse_impossible,
    transformer_config,
    without_fp8,
)
from tests.unit.models.one_rank import tiny_config, tiny_policy

KNOWN = {field.name for field in dataclasses.fields(TransformerConfig)}
# These fields do not exist in the oldest Megatron-Core that is supported.
OPTIONAL = {"embedding_init_method"}


def convert(**sections: Any) -> TransformerConfig:
    config = tiny_config(**sections)
    return transformer_config(config, resolve_parallel(config, 1))


def names_set_by_the_module() -> set[str]:
    """The string keys of all dictionaries in the module's functions."""
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


def test_what_megatron_core_refuses_is_told_without_a_traceback() -> None:
    """Only Megatron-Core knows that these two values do not fit together."""
    layers = {"megatron": {"recompute_num_layers": 2}}
    with pytest.raises(UserError, match=r"^model\.megatron: Megatron-Core .*recompute_num_layers"):
        convert(model=layers, training={"recompute": "selective"})
    assert convert(model=layers, training={"recompute": "full"}).recompute_num_layers == 2


@pytest.mark.usefixtures("one_rank")
def test_what_its_optimizer_refuses_is_told_too() -> None:
    refused = {"optimizer": "sgd", "use_precision_aware_optimizer": True}
    section = OptimizerSection(megatron=refused)
    wrong = r"^optimizer\.megatron: Megatron-Core refuses .* only supported with adam"
    with pytest.raises(UserError, match=wrong):
        build_trainer(tiny_policy(), section, Schedule.of(section, 1))


def test_megatron_draws_no_weights_itself_and_needs_no_kernels_of_apex() -> None:
    config = convert()
    weight = torch.full((2, 3), 5.0)
    for method in (config.init_method, config.output_layer_init_method):
        assert torch.equal(method(weight), torch.full((2, 3), 5.0))
    assert config.perform_initialization is True  # otherwise, TP shards would not be marked as such
    # This fusion needs a kernel of apex, which a CPU does not have.
    assert config.gradient_accumulation_fusion is False


@pytest.mark.parametrize("experts", [None, 8])
def test_experts_are_grouped(experts: int | None) -> None:
    config = convert(model={"megatron": {"num_moe_experts": experts}})
    assert config.num_moe_experts == experts
    assert config.moe_grouped_gemm is (experts is not None)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that Transformer Engine is new enough. Megatron-Core checks its version for FP8 with
    experts."""
    where = "megatron.core.transformer.transformer_config.is_te_min_version"
    monkeypatch.setattr(where, lambda *_: True)


def fp8_config(precision: str, **megatron: object) -> TransformerConfig:
    return convert(training={"precision": precision}, model={"megatron": megatron})


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("precision", list(FP8))
def test_weights_stay_bf16_and_the_router_fp32(precision: str) -> None:
    config = fp8_config(precision)
    assert (config.fp8, config.fp8_recipe) == (FP8[precision].format, FP8[precision].recipe)
    assert config.bf16 and config.params_dtype is torch.bfloat16
    assert not config.fp8_param and config.moe_router_dtype == "fp32"
    ddp = ddp_config(tiny_config(training={"precision": precision}))
    assert ddp.grad_reduce_in_fp32 and ddp.use_distributed_optimizer and not ddp.fp8_param_gather


@pytest.mark.usefixtures("engine")
def test_other_fields_of_a_recipe_are_the_users() -> None:
    assert fp8_config("fp8-delayed").fp8_amax_history_len == 1024
    config = fp8_config("fp8-delayed", fp8_amax_history_len=16, fp8_margin=1)
    assert (config.fp8_amax_history_len, config.fp8_margin) == (16, 1)
    assert config.fp8_amax_compute_algo == "max"
    ends = {"first_last_layers_bf16": True, "num_layers_at_end_in_bf16": 0}
    config = fp8_config("mxfp8", **ends)
    assert config.first_last_layers_bf16 and config.num_layers_at_end_in_bf16 == 0


@pytest.mark.usefixtures("one_rank")
def test_a_rank_without_a_gpu_refuses_fp8_in_one_line() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    config = tiny_config(training={"precision": "fp8-delayed"})
    with pytest.raises(UserError) as error:
        build_policy(config, resolve_parallel(config, 1), 37)
    (line,) = str(error.value).splitlines()
    assert line.startswith("training.precision = 'fp8-delayed': needs ")


@pytest.mark.parametrize(
    ("precision", "capability", "text"),
    [
        ("mxfp8", (9, 0), "needs a Blackwell GPU for data centres"),
        ("fp8-blockwise", (8, 9), "needs a Hopper or newer GPU"),
        ("fp8-delayed", (8, 0), "needs an Ada, Hopper or newer GPU"),
        ("fp8-delayed", (9, 0), None),
    ],
)
def test_a_gpu_that_cannot_do_it_is_named(
    monkeypatch: pytest.MonkeyPatch, precision: str, capability: tuple[int, int], text: str | None
) -> None:
    monkeypatch.setattr("gspo_megatron.models.transformer_config.engine_lacks", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "GPU Z")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    if text is None:
        refuse_impossible(precision, "transformer_engine")
        return
    with pytest.raises(UserError, match=text) as error:
        refuse_impossible(precision, "transformer_engine")
    assert f"this is a GPU Z ({capability[0]}.{capability[1]})" in str(error.value)


@pytest.mark.usefixtures("one_rank")
def test_decoding_is_in_bf16_and_leaves_fp8_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = tiny_policy()
    monkeypatch.setattr(policy.config, "fp8", "hybrid")
    monkeypatch.setattr(policy.config, "moe_router_padding_for_quantization", True)
    with pytest.raises(ZeroDivisionError), without_fp8(policy.models):
        assert policy.config.fp8 is None
        assert not policy.config.moe_router_padding_for_quantization
        raise ZeroDivisionError
    assert policy.config.fp8 == "hybrid" and policy.config.moe_router_padding_for_quantization


ENGINE = "transformer_engine"
LATENT = {"multi_latent_attention": True}
REFUSED: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "one epsilon of fused norms": (
        ENGINE,
        {**LATENT, "layernorm_epsilon": 1e-5},
        ("model.backend = transformer_engine: ", "1e-05"),
    ),
    "sinks on parts of a sequence": (
        ENGINE,
        {"softmax_type": "learnable", "context_parallel_size": 2},
        ("parallel.context_parallel_size = 2: ", "sinks", "allowed: 1, or"),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_attention_that_cannot_be_built_is_refused_by_name(name: str) -> None:
    backend, changes, parts = REFUSED[name]
    values = {
        "tensor_model_parallel_size": 1,
        "num_query_groups": 2,
        "multi_latent_attention": False,
        "sequence_parallel": True,
        "layernorm_epsilon": 1e-6,
        "q_lora_rank": 8,
        "context_parallel_size": 1,
        "bf16": True,
        "softmax_type": "vanilla",
        "window_size": None,
    } | changes
    with pytest.raises(UserError) as error:
        block_spec(SimpleNamespace(**values), backend, [False], None)
    assert str(error.value).startswith(parts[0]) and all(part in str(error.value) for part in parts)
