"""With adapters, the loss, the gradient norm and the gradient of each adapter matrix are the same
on every layout."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from gspo_megatron.config import Config
from gspo_megatron.config.lora import LoraSection
from gspo_megatron.models.build import Policy
from gspo_megatron.models.shards import parameter_shards
from gspo_megatron.verify import parity
from gspo_megatron.verify.parity import run_update
from gspo_megatron.verify.results import StepResult
from tests.parallel.models import NO_ROUTER_LOSSES, odd_moe
from tests.parallel.pool import Pool
from tests.parallel.updates import (
    FP32_TOLERANCE,
    FP64_TOLERANCE,
    FP64_TOLERANCE_OF_ROUTERS,
    assert_norm_is_that_of_the_gradients,
    assert_same_gradients,
    assert_same_update,
    update,
)
from tests.unit.hf.policies import config_of
from tests.unit.hf.published import VOCABULARY, write_model


@torch.no_grad()
def stir(policy: Policy) -> Policy:
    """Give each matrix B random values that depend only on its name. A zero B would give A no
    gradient."""
    for model in policy.models:
        for shard in parameter_shards(model):
            if "lora." in shard.name and ".b" in shard.name:
                digest = hashlib.sha256(shard.name.encode()).digest()
                generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
                drawn = 0.2 * torch.randn(shard.global_shape, generator=generator)
                shard.data.copy_(drawn[shard.slices])
    return policy


def update_with_adapters(**arguments: Any) -> StepResult:
    """Run `run_update` on a model whose adapters have an effect."""
    native = parity.build_policy

    def build_policy(config: Config, *others: Any) -> Policy:
        return stir(native(config, *others))

    with mock.patch.object(parity, "build_policy", build_policy):
        return run_update(**arguments)


def with_lora(config: Config, **lora: Any) -> Config:
    section = LoraSection(**({"rank": 6, "alpha": 9.0} | lora))
    return config.model_copy(update={"model": config.model.model_copy(update={"lora": section})})


# With these fields, the tiny MoE belongs to the family qwen2_moe.
QWEN2_MOE: dict[str, Any] = NO_ROUTER_LOSSES | {
    "moe_shared_expert_gate": True,
    "add_qkv_bias": True,
    "qk_layernorm": False,
}


def _update(pool: Pool, layout: str, precision: str = "fp64", **options: Any) -> StepResult:
    lora = options.pop("lora", {})
    training = {"precision": precision} | options.pop("training", {})
    config = odd_moe(layout, training=training, **QWEN2_MOE, **options)
    return update(pool, with_lora(config, **lora), update_with_adapters)


@pytest.fixture(scope="module")
def reference(pool: Pool) -> StepResult:
    return _update(pool, "tp=1")


def test_all_adapters_and_nothing_else_have_gradients(reference: StepResult) -> None:
    assert len(reference.gradients) == 4 * 8 + 6 + 3 * (6 + 8 * 6)
    for name, gradient in reference.gradients.items():
        assert "lora." in name and bool(gradient.any()), name


@pytest.mark.parametrize(
    "layout",
    [
        "dp=2",
        "tp=2",
        "pp=2",
        "pp=2,vpp=2",
        "ep=2",
        "tp=2,etp=2",
        "cp=2",
        "tp=2,ep=2",
        "tp=2,etp=2,ep=2,dp=2",
        "tp=2,pp=2,cp=2,ep=2",
    ],
)
def test_the_update_is_that_of_one_rank(pool: Pool, reference: StepResult, layout: str) -> None:
    result = _update(pool, layout)
    assert_same_update(result, reference, FP64_TOLERANCE)
    assert_norm_is_that_of_the_gradients(result)


@pytest.mark.parametrize(
    ("options", "layout"),
    [
        # Each case has some of these: shards of the head, tied embeddings, padded rows, adapters of
        # only a few matrices.
        ({"tie_embeddings": True}, "tp=2,pp=2"),
        ({"training": {"packing": False, "recompute": "full"}}, "tp=2,cp=2,ep=2"),
        ({"lora": {"targets": ["q_proj", "v_proj", "up_proj", "router"]}}, "tp=2,ep=2,etp=2"),
        # The rows of the head are cut over TP, and some rows are padding. Only the last stage has
        # the head.
        ({"lora": {"targets": ["head", "router", "o_proj"]}}, "tp=2,pp=2,ep=2"),
        ({"lora": {"targets": ["head"]}}, "tp=2,cp=2"),
        # One stage has no adapters, but gradients pass through it.
        ({"lora": {"targets": ["mlp"]}}, "pp=2"),
        ({"lora": {"targets": ["experts"]}, "training": {"recompute": "selective"}}, "pp=2,ep=2"),
    ],
    ids=["tied", "padded", "few", "head and router", "head", "dense layers", "experts"],
)
def test_the_update_of_other_models_is_that_of_one_rank(
    pool: Pool, options: dict[str, Any], layout: str
) -> None:
    result, alone = _update(pool, layout, **options), _update(pool, "tp=1", **options)
    assert_same_update(result, alone, FP64_TOLERANCE_OF_ROUTERS)
    assert_norm_is_that_of_the_gradients(result)


def test_gradients_that_are_sent_during_the_backward_pass_are_the_same(pool: Pool) -> None:
    fp32 = {"precision": "fp32"}
    overlap = _update(pool, "tp=2,ep=2,dp=2", **fp32, ddp={"overlap_grad_reduce": True})
    assert_same_gradients(overlap, _update(pool, "tp=1", **fp32), FP32_TOLERANCE)


@pytest.mark.parametrize(
    ("family", "layout", "sequence_parallel"),
    [
        ("deepseek_v3", "tp=2", None),
        ("deepseek_v3", "tp=2,pp=2,ep=2", None),
        ("llama", "tp=2,cp=2", None),
        ("llama", "tp=2", False),
        ("mixtral", "tp=2,etp=2", None),
    ],
)
def test_every_kind_of_attention_has_adapters(
    pool: Pool, tmp_path: Path, family: str, layout: str, sequence_parallel: bool | None
) -> None:
    folder = write_model(tmp_path / "model", family, seed=1)
    results = []
    for each in (layout, "tp=1"):
        config = with_lora(config_of(folder, layout=each, init_method_std=0.15))
        parallel = config.parallel
        if each == layout:
            parallel = parallel.model_copy(update={"sequence_parallel": sequence_parallel})
        config = config.model_copy(update={"parallel": parallel})
        results.append(update(pool, config, update_with_adapters, vocab_size=VOCABULARY))
    assert_same_gradients(*results, FP32_TOLERANCE)
    assert results[0].metrics["loss"] == pytest.approx(results[1].metrics["loss"], rel=1e-4)
    assert_norm_is_that_of_the_gradients(results[0])
