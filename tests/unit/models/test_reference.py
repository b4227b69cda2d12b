"""The reference policy's weights in the policy's place, and back."""

from __future__ import annotations

import pytest
import torch

from gspo_megatron.models.reference import ReferencePolicy
from tests.unit.models.one_rank import tiny_policy

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.mark.parametrize("offload", [False, True])
def test_all_that_decides_the_output_changes_places(offload: bool) -> None:
    """The routers' biases too, which balance without an auxiliary loss and are no parameters."""
    balancing = {
        "moe_router_enable_expert_bias": True,
        "moe_router_score_function": "sigmoid",
        "moe_aux_loss_coeff": 0.0,
    }
    policy = tiny_policy(model={"megatron": balancing})
    (model,) = policy.models
    tensors = dict(model.named_parameters())
    tensors |= {n: b for n, b in model.named_buffers() if n.endswith("expert_bias")}
    assert len(tensors) > len(dict(model.named_parameters()))
    before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    reference = ReferencePolicy(policy, offload=offload)
    with torch.no_grad():
        for tensor in tensors.values():
            tensor.add_(1.0)
    with reference.in_place():
        assert all(torch.equal(tensor, before[name]) for name, tensor in tensors.items())
    assert all(torch.equal(tensor, before[name] + 1.0) for name, tensor in tensors.items())
