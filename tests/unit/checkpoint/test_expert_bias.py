"""The routers' biases for balancing without auxiliary loss, which Megatron-Core keeps in
float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gspo_megatron.checkpoint.tensors import load_model, save_tensors
from gspo_megatron.models.build import Policy
from tests.unit.models.one_rank import tiny_policy

pytestmark = pytest.mark.usefixtures("one_rank")


def policy_of(precision: str) -> Policy:
    megatron = {
        "moe_router_enable_expert_bias": True,
        "moe_router_score_function": "sigmoid",
        "moe_router_load_balancing_type": "none",
    }
    return tiny_policy(model={"megatron": megatron}, training={"precision": precision})


def biases(policy: Policy) -> dict[str, torch.Tensor]:
    named = policy.models[0].named_buffers()
    return {name: value for name, value in named if name.endswith("expert_bias")}


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_model_that_has_not_run_yet_takes_them_back(precision: str, tmp_path: Path) -> None:
    """The biases are float32 in every precision."""
    saved = policy_of(precision)
    generator = torch.Generator().manual_seed(1)
    for bias in biases(saved).values():  # values that do not exist in bf16
        bias.data = torch.rand(bias.shape, generator=generator)
    save_tensors(tmp_path, saved, None, asynchronous=False).result()
    loaded = policy_of(precision)
    load_model(tmp_path, loaded)
    wanted = biases(saved)
    assert len(wanted) == 2
    for name, bias in biases(loaded).items():
        assert bias.dtype is torch.float32 and torch.equal(bias, wanted[name]), name
