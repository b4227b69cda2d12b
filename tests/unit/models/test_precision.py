"""What a precision makes of the model, and how a rank without the hardware says no."""

from __future__ import annotations

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from gspo_megatron.config import resolve_parallel
from gspo_megatron.config.precision import FP8
from gspo_megatron.errors import UserError
from gspo_megatron.models.build import build_policy, ddp_config
from gspo_megatron.models.transformer_config import (
    refuse_impossible,
    transformer_config,
    without_fp8,
)
from tests.unit.models.one_rank import tiny_config, tiny_policy


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron-Core asks for its version as soon as a model with experts is to be in FP8."""
    where = "megatron.core.transformer.transformer_config.is_te_min_version"
    monkeypatch.setattr(where, lambda *_: True)


def fp8_config(precision: str, **megatron: object) -> TransformerConfig:
    config = tiny_config(training={"precision": precision}, model={"megatron": megatron})
    return transformer_config(config, resolve_parallel(config, 1))


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
