"""The policy that RL started from, frozen: the other side of a KL divergence."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from gspo_megatron.models.build import Policy


class ReferencePolicy:
    """The policy's weights as they are now, to be put in the policy's place for a forward pass.

    No second model: Megatron-Core keeps some of what belongs to a model in process-wide lists (the
    routers' replay), and a second one of 10^11 parameters has no room. Weights change places one
    by one, so that no more than one of them exists a third time.
    """

    def __init__(self, policy: Policy, *, offload: bool) -> None:
        """offload: in host memory, pinned where there is a device to copy to."""
        self._chunks = policy.chunks
        # the routers' biases without auxiliary loss change too, and are buffers
        self._tensors = [
            tensor
            for model in policy.models
            for tensor in (*model.parameters(), *_expert_biases(model))
        ]
        self._weights = []
        for tensor in self._tensors:
            kept = tensor.detach()
            if offload:
                pinned = kept.is_cuda
                host = torch.empty_like(kept, device="cpu", pin_memory=pinned)
                self._weights.append(host.copy_(kept))
            else:
                self._weights.append(kept.clone())

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the policy's modules compute with the reference's weights."""
        for chunk in self._chunks:
            if chunk.ddp_config.overlap_param_gather:
                # the weights of the last update may still be on their way
                chunk.start_param_sync(force_sync=True)
        self._change_places()
        try:
            yield
        finally:
            self._change_places()

    @torch.no_grad()
    def _change_places(self) -> None:
        for tensor, weight in zip(self._tensors, self._weights, strict=True):
            kept = tensor.clone()
            tensor.copy_(weight)
            weight.copy_(kept)


def _expert_biases(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    return (b for name, b in model.named_buffers() if name.endswith("expert_bias"))
