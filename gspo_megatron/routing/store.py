"""Routes of a micro-batch, as small as they can be kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class RouteTable:
    """The experts of a micro-batch's tokens as this rank's routers see them: its layers, and its
    shard of the tokens under context and sequence parallelism."""

    layers: tuple[int, ...]
    experts: Tensor  # [layers, tokens, k] uint8 or int16
    known: Tensor | None  # [tokens] bool; None: all. The others route natively.

    @classmethod
    def of_layers(
        cls, experts: Mapping[int, Tensor], known: Tensor | None, *, on_host: bool
    ) -> RouteTable:
        """From [tokens, k] of each layer, by one copy."""
        layers = tuple(sorted(experts))
        joined = torch.stack([experts[layer] for layer in layers])
        return cls(layers, joined, known).moved(on_host=on_host)

    def moved(self, *, on_host: bool) -> RouteTable:
        """On the host, if that is wanted, until the micro-batch needs it."""
        if on_host and self.experts.is_cuda:
            host = torch.empty_like(self.experts, device="cpu", pin_memory=True)
            self.experts = host.copy_(self.experts, non_blocking=True)
        return self

    @property
    def num_bytes(self) -> int:
        return self.experts.numel() * self.experts.element_size()

    def to(self, device: torch.device) -> Tensor:
        """[layers, tokens, k] on a device: one copy for all layers."""
        return self.experts.to(device, non_blocking=True)
