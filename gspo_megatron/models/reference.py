"""Frozen weights that replace the policy's weights for a forward pass. They are the reference
policy of a KL divergence (the policy at the start of RL), or a teacher of the policy's shape."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

import torch

from gspo_megatron.models.build import Policy


class ReferencePolicy:
    """A copy of the weights that the policy has when this object is made. For a forward pass, the
    copy replaces the policy's weights.

    There is no second model, because Megatron-Core keeps parts of a model in lists of the whole
    process (for the replay of routes). Weights are exchanged one by one, so a third copy exists of
    only one weight at a time.

    With LoRA there is no copy of the frozen weights. The reference is the policy without its
    adapters. If RL began with loaded adapters, the reference is the policy with a copy of those
    adapters.
    """

    def __init__(self, policy: Policy, *, offload: bool) -> None:
        """offload: keep the copy in host memory, pinned if the policy is on a GPU."""
        self._policy = policy
        lora = policy.lora
        self._off = lora if lora is not None and lora.starts_as_base else None
        self._tensors: list[torch.Tensor] = []
        for model in policy.models if self._off is None else ():
            self._tensors += (p for p in model.parameters() if p.requires_grad)
            if lora is None:
                # the routers' expert biases (without auxiliary loss) are trained too
                biases = (b for name, b in model.named_buffers() if name.endswith("expert_bias"))
                self._tensors += biases
        self._weights = []
        for tensor in self._tensors:
            device = torch.device("cpu") if offload else tensor.device
            kept = torch.empty_like(tensor, device=device, pin_memory=offload and tensor.is_cuda)
            self._weights.append(kept.detach().copy_(tensor.detach()))

    @contextlib.contextmanager
    def in_place(self) -> Generator[None]:
        """Let the policy's modules compute with the reference's weights while the context lasts."""
        if self._off is not None:
            with self._off.off():
                yield
            return
        self._policy.finish_parameter_gather()
        self.swap()
        try:
            yield
        finally:
            self.swap()

    def is_finite(self) -> bool:
        """Whether all weights of the copy are finite, in this rank's shards."""
        return all(bool(weight.isfinite().all()) for weight in self._weights)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the weights of the copy and of the policy."""
        for tensor, weight in zip(self._tensors, self._weights, strict=True):
            kept = tensor.clone()
            tensor.copy_(weight)
            weight.copy_(kept)
