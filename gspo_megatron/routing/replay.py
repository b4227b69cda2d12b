"""Routing Replay: the experts of one forward pass, used again in another (arXiv 2507.18071, 5.3).

Only the choice is replayed. The weights of the chosen experts come from the live router's scores,
and gradients flow through them.
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

# Scores are kept of at most so many tokens of a micro-batch, at equal distances: all of them would
# take 12 KB a token with 48 layers of 128 experts, 32 times as much as the routes.
MAX_SCORED_TOKENS = 512


def expert_dtype(num_experts: int) -> torch.dtype:
    """How the numbers of experts are stored: one byte for up to 256 experts, two beyond."""
    return torch.uint8 if num_experts <= 256 else torch.int16


def no_routes(config: TransformerConfig, *sizes: int, device: torch.device) -> Tensor:
    """[*sizes, k], for places without tokens or without layers."""
    dtype = expert_dtype(config.num_moe_experts)
    return torch.zeros((*sizes, config.moe_router_topk), dtype=dtype, device=device)


@dataclass
class RouteTable:
    """The experts of a micro-batch's tokens as this rank's routers see them: its layers, and its
    shard of the tokens under context and sequence parallelism."""

    layers: tuple[int, ...]
    experts: Tensor  # [layers, tokens, k] uint8 or int16
    known: Tensor | None  # [tokens] bool; None: all. The router chooses for the others.

    def moved(self, *, on_host: bool) -> RouteTable:
        """Copied to pinned host memory if `on_host` is true."""
        if on_host:
            self.experts = to_host(self.experts)
        return self

    @property
    def num_bytes(self) -> int:
        return self.experts.numel() * self.experts.element_size()

    def of_layer(self, layer: int, device: torch.device) -> Tensor:
        """[tokens, k] int64 on a device. Only this layer is copied there: with the table on the
        host, a pass over many micro-batches needs device memory for one layer of one of them."""
        experts = self.experts[self.layers.index(layer)]
        return experts.to(device, non_blocking=True).long()


def to_host(values: Tensor) -> Tensor:
    """A tensor in pinned host memory, where copies back to the device need not wait."""
    if not values.is_cuda:
        return values
    host = torch.empty_like(values, device="cpu", pin_memory=True)
    return host.copy_(values, non_blocking=True)


def scored_tokens(num_tokens: int) -> slice:
    """The rows of a micro-batch whose scores are kept."""
    return slice(None, None, max(1, -(-num_tokens // MAX_SCORED_TOKENS)))


class Recording:
    """Remembers what the routers choose, or would choose where `inner` decides otherwise."""

    def __init__(
        self,
        inner: Routes | None = None,
        *,
        keep_scores: bool = False,
        num_layers: int | None = None,
        on_host: bool = False,
    ) -> None:
        """`num_layers`: routers of this rank. After the last of them the routes become one table,
        on the host if `on_host` is true, so that they do not pile up on the device during a pass.
        """
        self.experts: dict[int, Tensor] = {}  # by layer, [tokens, k]
        self.scores: dict[int, Tensor] = {}  # by layer, [scored tokens, experts]; where wanted
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
        """Those recorded so far."""
        return tuple(sorted(self.experts)) if self._table is None else self._table.layers

    def table(self) -> RouteTable:
        """All layers' routes in one tensor."""
        if self._table is not None:
            return self._table
        experts = torch.stack([self.experts[layer] for layer in self.layers])
        return RouteTable(self.layers, experts, None).moved(on_host=self._on_host)


@contextlib.contextmanager
def recorded() -> Generator[dict[int, Tensor]]:
    """The experts [tokens, k] that forward passes inside choose, by layer."""
    recording = Recording()
    with routed(recording):
        yield recording.experts


class Replaying:
    """Sends tokens to the experts of a table."""

    def __init__(self, table: RouteTable) -> None:
        self._table = table
        self._uses: Counter[tuple[int, bool]] = Counter()  # of a layer; with gradients or without

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
        """Assert that every layer asked for its routes exactly once: in the pass with gradients
        when training (recomputation runs one without them before it), else in one without."""
        uses = {layer: self._uses[layer, training] for layer in self._table.layers}
        missing = sorted(layer for layer, count in uses.items() if count == 0)
        assert not missing, f"the routers of layers {missing} never asked for their routes"
        again = sorted(layer for layer, count in uses.items() if count > 1)
        assert not again, f"the routers of layers {again} asked for their routes more than once"
        stray = not training and any(with_gradients for _, with_gradients in self._uses)
        assert not stray, "routes of a pass without gradients were used in one with gradients"
