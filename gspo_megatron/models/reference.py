"""Frozen weights that take the policy's place for a pass: the reference policy of a KL divergence,
which RL started from, and a teacher of the policy's shape."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

import torch

from gspo_megatron.models.build import Policy


class ReferencePolicy:
    """A copy of the policy's present weights, which replaces them for a forward pass.

    There is no second model: Megatron-Core keeps parts of a model in process-wide lists (the
    routers' replay). Weights are swapped one by one, so only one of them exists three times.
    """

    def __init__(self, policy: Policy, *, offload: bool) -> None:
        """offload: keep the copy in host memory, pinned if the policy is on a GPU."""
        self._policy = policy
        # the routers' expert biases (without auxiliary loss) are trained too, and are buffers
        self._tensors = [
            tensor
            for model in policy.models
            for tensor in (
                *model.parameters(),
                *(b for name, b in model.named_buffers() if name.endswith("expert_bias")),
            )
        ]
        self._weights = []
        for tensor in self._tensors:
            device = torch.device("cpu") if offload else tensor.device
            kept = torch.empty_like(tensor, device=device, pin_memory=offload and tensor.is_cuda)
            self._weights.append(kept.detach().copy_(tensor.detach()))

    @contextlib.contextmanager
    def in_place(self) -> Generator[None]:
        """Inside, the policy's modules compute with the reference's weights."""
        self._policy.finish_parameter_gather()
        self.swap()
        try:
            yield
        finally:
            self.swap()

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the weights here and those of the policy."""
        for tensor, weight in zip(self._tensors, self._weights, strict=True):
            kept = tensor.clone()
            tensor.copy_(weight)
            weight.copy_(kept)
