"""Decoding compared with full forward passes, for the options of routers and norms, in fp32 and
bf16."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from gspo_megatron.models import decoding
from gspo_megatron.models.attention import Spans
from gspo_megatron.models.build import Policy
from gspo_megatron.models.transformer_config import changed
from tests.unit.models.one_rank import hidden_states, tiny_policy
from tests.unit.models.test_decoding import SEQUENCES, TOKENS, decoded

pytestmark = pytest.mark.usefixtures("one_rank")

SIGMOID = {"moe_router_score_function": "sigmoid"}
BIASED = {**SIGMOID, "moe_router_enable_expert_bias": True}
# Each token gets four experts from two groups of four. A plain top 4 would choose other experts.
GROUPS = {"moe_router_topk": 4, "moe_router_num_groups": 4, "moe_router_group_topk": 2}
ROUTERS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "softmax of all": {"moe_router_pre_softmax": True},
    "softmax, scaled": {"moe_router_topk_scaling_factor": 2.5},
    "softmax of all, scaled": {
        "moe_router_pre_softmax": True,
        "moe_router_topk_scaling_factor": 0.4,
    },
    "softmax, groups": {**GROUPS},
    "top 1": {"moe_router_topk": 1, "moe_router_pre_softmax": True},
    "top 3": {"moe_router_topk": 3},
    "sigmoid": SIGMOID,
    "sigmoid, scaled": {**SIGMOID, "moe_router_topk_scaling_factor": 2.5},
    "sigmoid, expert bias": BIASED,
    "sigmoid, expert bias, groups, scaled": {
        **BIASED,
        **GROUPS,
        "moe_router_topk_scaling_factor": 2.5,
    },
    "losses": {"moe_aux_loss_coeff": 0.01, "moe_z_loss_coeff": 0.001},
}
DTYPES = [None, "fp32", "fp64"]  # dtypes of routers; None: the dtype of the states
NORMS: dict[str, dict[str, Any]] = {
    "RMSNorm": {"normalization": "RMSNorm", "qk_layernorm": False},
    "RMSNorm, of heads": {"normalization": "RMSNorm", "qk_layernorm": True},
    "RMSNorm, around zero": {
        "normalization": "RMSNorm",
        "layernorm_zero_centered_gamma": True,
        "qk_layernorm": False,
    },
    "RMSNorm, around zero, of heads": {
        "normalization": "RMSNorm",
        "layernorm_zero_centered_gamma": True,
        "qk_layernorm": True,
    },
    "LayerNorm": {"normalization": "LayerNorm", "qk_layernorm": False},
    "LayerNorm, of heads": {"normalization": "LayerNorm", "qk_layernorm": True},
    "LayerNorm, around zero": {
        "normalization": "LayerNorm",
        "layernorm_zero_centered_gamma": True,
        "qk_layernorm": True,
    },
    "epsilon": {"normalization": "RMSNorm", "qk_layernorm": True, "layernorm_epsilon": 0.5},
}


def policy_with(precision: str, **megatron: Any) -> Policy:
    """A policy in which the weights of norms and biases are far from their initial values."""
    policy = tiny_policy(
        model={"megatron": {"init_method_std": 0.15, **megatron}}, training={"precision": precision}
    )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        named = [*policy.models[0].named_parameters(), *policy.models[0].named_buffers()]
        for name, values in named:
            if ("bias" in name or "norm" in name) and values.is_floating_point():
                values += 0.2 * torch.randn(values.shape, generator=generator).to(values.dtype)
    policy.models[0].eval()
    return policy


def router_of(policy: Policy) -> TopKRouter:
    return next(m for m in policy.models[0].modules() if isinstance(m, TopKRouter))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ROUTERS)
def test_experts_and_weights_are_those_of_the_stock_router(name: str, precision: str) -> None:
    """Experts and weights are equal bit for bit, because one additional rounding of a weight could
    change sampled tokens."""
    policy = policy_with(precision, num_layers=1, **ROUTERS[name])
    router = router_of(policy)
    experts = decoding.LocalExperts(policy.models[0].decoder.layers[0].mlp)
    generator = torch.Generator().manual_seed(2)
    size = (40, 3, policy.config.hidden_size)
    states = torch.randn(size, generator=generator).to(policy.config.params_dtype)
    for dtype in DTYPES:
        with torch.no_grad(), changed([(router.config, "moe_router_dtype", dtype)]):
            expected = decoding._choose_by_stock_router(router, states)
            for own, stock in zip(experts.choose(router, states), expected, strict=True):
                assert torch.equal(own, stock), dtype


def both(policy: Policy) -> tuple[Tensor, Tensor]:
    """The hidden states [sequences, tokens, hidden] of the last tokens, from decoding and from full
    forward passes."""
    with torch.no_grad():
        expected = [hidden_states(policy, sequence)[-TOKENS:] for sequence in SEQUENCES]
    return decoded(policy, Spans(1, 11, 6), [1]).float(), torch.stack(expected).float()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "options", ["softmax of all, scaled", "sigmoid, expert bias, groups, scaled", *NORMS]
)
def test_hidden_states_are_those_of_the_full_pass(options: str, precision: str) -> None:
    """Two layers are enough, because the test above compares the choices of every router."""
    policy = policy_with(precision, **{**ROUTERS, **NORMS}[options])
    found, expected = both(policy)
    error = (found - expected).norm(dim=-1) / expected.norm(dim=-1)  # [sequences, tokens]
    # The order of sums differs, and in bf16 every operation rounds by up to 2^-9. Where two experts
    # are about equally probable, decoding may choose the other one. That happens for a few tokens.
    largest = error.flatten().sort(descending=True).values
    if precision == "fp32":
        assert largest[0] < 2e-6
    else:
        assert largest[2] < 0.03 and largest[len(largest) // 2] < 0.01
