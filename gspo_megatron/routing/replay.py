"""Routing Replay: the experts of one forward pass, used again in another (arXiv 2507.18071, 5.3).

Only the choice is replayed. The weights of the chosen experts come from the live router's scores,
and gradients flow through them.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from gspo_megatron.routing.expert_ids import expert_dtype
from gspo_megatron.routing.hooks import Choice, Routes, routed
from gspo_megatron.routing.store import RouteTable


class Recording:
    """Remembers what the routers choose, or would choose where `inner` decides otherwise."""

    def __init__(self, inner: Routes | None = None, *, keep_scores: bool = False) -> None:
        self.experts: dict[int, Tensor] = {}  # by layer, [tokens, k]
        self.scores: dict[int, Tensor] = {}  # by layer, [tokens, experts]; where wanted
        self.inner, self._keep_scores = inner, keep_scores

    def choose(self, layer: int, scores: Tensor, native: Callable[[], Choice]) -> Choice:
        """See Routes.choose."""
        chosen = native()
        assert layer not in self.experts, f"layer {layer} is recorded already"
        self.experts[layer] = chosen[1].detach().to(expert_dtype(scores.shape[-1]))
        if self._keep_scores:
            self.scores[layer] = scores.detach().to(torch.bfloat16)
        return chosen if self.inner is None else self.inner.choose(layer, scores, lambda: chosen)

    def table(self, *, on_host: bool = False) -> RouteTable:
        """All layers' routes in one tensor."""
        return RouteTable.of_layers(self.experts, None, on_host=on_host)


@contextlib.contextmanager
def recorded() -> Iterator[dict[int, Tensor]]:
    """The experts [tokens, k] that forward passes inside choose, by layer."""
    recording = Recording()
    with routed(recording):
        yield recording.experts


class Replaying:
    """Sends tokens to the experts of a table."""

    def __init__(self, table: RouteTable) -> None:
        self._table = table
        self._rows = {layer: row for row, layer in enumerate(table.layers)}
        self._experts: Tensor | None = None
        self._uses: Counter[tuple[int, bool]] = Counter()  # of a layer; with gradients or without

    def choose(self, layer: int, scores: Tensor, native: Callable[[], Choice]) -> Choice:
        """See Routes.choose."""
        if self._experts is None:
            self._experts = self._table.to(scores.device)
        experts = self._experts[self._rows[layer]].long()
        assert len(experts) == len(scores), (
            f"layer {layer}: routes of {len(experts)} tokens for {len(scores)}"
        )
        self._uses[layer, torch.is_grad_enabled()] += 1
        known = self._table.known
        if known is not None:
            experts = torch.where(known[:, None].to(scores.device), experts, native()[1])
        return scores.gather(1, experts), experts

    def assert_used(self, *, training: bool) -> None:
        """Every layer asked for its routes, and once: where gradients are wanted, in the one pass
        that has them (with recomputation there is one without before it); else in one without."""
        uses = {layer: self._uses[layer, training] for layer in self._rows}
        missing = sorted(layer for layer, count in uses.items() if count == 0)
        assert not missing, f"the routers of layers {missing} never asked for their routes"
        again = sorted(layer for layer, count in uses.items() if count > 1)
        assert not again, f"the routers of layers {again} asked for their routes more than once"
        stray = not training and any(with_gradients for _, with_gradients in self._uses)
        assert not stray, "routes of a pass without gradients were used in one with gradients"
