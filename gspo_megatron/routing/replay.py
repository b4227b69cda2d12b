"""Routing Replay: a forward pass uses the experts of an earlier pass (arXiv 2507.18071, 5.3).

It replays only the choice of experts. Their weights come from the scores of the router in the
current pass, and gradients flow through them.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from gspo_megatron.routing.hooks import Choice, Routes, routed

# The most tokens of a micro-batch whose scores are recorded; they are evenly spaced. All scores
# would take 12 KB a token with 48 layers of 128 experts. The routes take 1/32 of that.
MAX_SCORED_TOKENS = 512


def expert_dtype(num_experts: int) -> torch.dtype:
    """Return the dtype for expert numbers: one byte for up to 256 experts, else two."""
    return torch.uint8 if num_experts <= 256 else torch.int16


def no_routes(config: TransformerConfig, *sizes: int, device: torch.device) -> Tensor:
    """Return a table of zeros, [*sizes, k], for ranks without tokens or without layers."""
    dtype = expert_dtype(config.num_moe_experts)
    return torch.zeros((*sizes, config.moe_router_topk), dtype=dtype, device=device)


@dataclass
class RouteTable:
    """The experts of a micro-batch's tokens on this rank.

    It covers the layers of this rank, and its shard of the tokens under context and sequence
    parallelism.
    """

    layers: tuple[int, ...]
    experts: Tensor  # [layers, tokens, k] uint8 or int16
    known: Tensor | None  # [tokens] bool; None: all. For unknown tokens the router chooses.

    def moved(self, *, on_host: bool) -> RouteTable:
        """Copy the experts to pinned host memory if `on_host` is true."""
        if on_host:
            self.experts = to_host(self.experts)
        return self

    @property
    def num_bytes(self) -> int:
        return self.experts.numel() * self.experts.element_size()

    def of_layer(self, layer: int, device: torch.device) -> Tensor:
        """Return the experts of one layer, [tokens, k] int64, on `device`.

        Copies only this layer. So with tables on the host, a pass over many micro-batches needs
        device memory for one layer of one micro-batch.
        """
        experts = self.experts[self.layers.index(layer)]
        return experts.to(device, non_blocking=True).long()


def to_host(values: Tensor) -> Tensor:
    """Copy a tensor to pinned host memory, from which copies to the device are asynchronous."""
    if not values.is_cuda:
        return values
    host = torch.empty_like(values, device="cpu", pin_memory=True)
    return host.copy_(values, non_blocking=True)


def scored_tokens(num_tokens: int) -> slice:
    """Return the rows of a micro-batch whose scores are recorded."""
    return slice(None, None, max(1, -(-num_tokens // MAX_SCORED_TOKENS)))


class Recording:
    """Records the routers' own choice, even if `inner` makes another choice, which is then used."""

    def __init__(
        self,
        inner: Routes | None = None,
        *,
        keep_scores: bool = False,
        num_layers: int | None = None,
        on_host: bool = False,
    ) -> None:
        """`num_layers` is the number of routers on this rank. After the last router, the recording
        joins the routes into one table. With `on_host` it moves the table to the host, so that
        tables do not fill the device memory during a pass.
        """
        self.experts: dict[int, Tensor] = {}  # by layer, [tokens, k]
        self.scores: dict[int, Tensor] = {}  # by layer, [scored tokens, experts], if keep_scores
        self.inner, self._keep_scores = inner, keep_scores
        self._num_layers, self._on_host = num_layers, on_host
        self._table: RouteTable | None = None

    def choose(self, layer: int, scores: Tensor, native: Callable[[], Choice]) -> Choice:
        """See Routes.choose."""
        chosen = native()
        is_known = layer in self.experts or self._table is not None
        assert not is_known, f"layer {layer} is recorded already"
        self.experts[layer] = chosen[1].detach().to(expert_dtype(scores.shape[-1]))
        if self._keep_scores:
            kept = scores.detach()[scored_tokens(len(scores))].to(torch.bfloat16)
            self.scores[layer] = to_host(kept) if self._on_host else kept
        if len(self.experts) == self._num_layers:
            self._table = self.table()
            self.experts = {}
        return chosen if self.inner is None else self.inner.choose(layer, scores, lambda: chosen)

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers recorded so far."""
        return tuple(sorted(self.experts)) if self._table is None else self._table.layers

    def table(self) -> RouteTable:
        """Return the routes of all layers in one table."""
        if self._table is not None:
            return self._table
        experts = torch.stack([self.experts[layer] for layer in self.layers])
        return RouteTable(self.layers, experts, None).moved(on_host=self._on_host)


@contextlib.contextmanager
def recorded() -> Generator[dict[int, Tensor]]:
    """Record the experts of forward passes in this context; yields [tokens, k] by layer."""
    recording = Recording()
    with routed(recording):
        yield recording.experts


class Replaying:
    """Sends tokens to the experts of a table."""

    def __init__(self, table: RouteTable) -> None:
        self._table = table
        self._uses: Counter[tuple[int, bool]] = Counter()  # by (layer, with gradients)

    def choose(self, layer: int, scores: Tensor, native: Callable[[], Choice]) -> Choice:
        """See Routes.choose."""
        experts = self._table.of_layer(layer, scores.device)
        assert len(experts) == len(scores), (
            f"layer {layer}: routes of {len(experts)} tokens for {len(scores)}"
        )
        self._uses[layer, torch.is_grad_enabled()] += 1
        known = self._table.known
        if known is not None:
            experts = torch.where(known[:, None].to(scores.device), experts, native()[1])
        return scores.gather(1, experts), experts

    def assert_used(self, *, training: bool) -> None:
        """Assert that every layer used its routes exactly once.

        In training, this counts the pass with gradients (recomputation first runs one without
        gradients). Otherwise it counts the pass without gradients.
        """
        uses = {layer: self._uses[layer, training] for layer in self._table.layers}
        missing = sorted(layer for layer, count in uses.items() if count == 0)
        assert not missing, f"the routers of layers {missing} never asked for their routes"
        again = sorted(layer for layer, count in uses.items() if count > 1)
        assert not again, f"the routers of layers {again} asked for their routes more than once"
        stray = not training and any(with_gradients for _, with_gradients in self._uses)
        assert not stray, "routes of a pass without gradients were used in one with gradients"
