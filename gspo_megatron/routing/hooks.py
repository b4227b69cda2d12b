"""Hooks on the routers: each forward pass can decide which experts its tokens go to.

Megatron-Core's TopKRouter asks its `router_replay` object for the experts, if it has one. The stock
object keeps one process-wide list, which a second model, virtual stages or recomputation mix up.
Here each router has a hook that knows its layer number only. What to do comes from the running
forward pass, by a context variable, which recomputation restores (platform/megatron_fixes.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from contextvars import ContextVar
from itertools import chain
from typing import Protocol

import torch
from megatron.core.transformer.moe.router import Router, TopKRouter
from torch import Tensor

# Megatron-Core's ways to balance the load that choose experts without asking the hook.
NEVER_ASKING = ("sinkhorn", "quantile_balancing")

Choice = tuple[Tensor, Tensor]  # scores [tokens, k] of the chosen experts, experts [tokens, k]


class Routes(Protocol):
    """What one micro-batch's forward pass does at each router."""

    def choose(self, layer: int, scores: Tensor, native: Callable[[], Choice]) -> Choice:
        """The experts of a layer's tokens. scores: [tokens, experts], what the router would take
        the top k of; native: its own choice."""


_current: ContextVar[Routes | None] = ContextVar("routes", default=None)


@contextlib.contextmanager
def routed(routes: Routes | None) -> Generator[None]:
    """Forward passes inside, and their recomputation later, choose experts by `routes`."""
    token = _current.set(routes)
    try:
        yield
    finally:
        _current.reset(token)


class RouterHook:
    """Stands where TopKRouter looks for a RouterReplay."""

    def __init__(self, layer: int) -> None:
        self.layer = layer

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., Choice] | None = None,
    ) -> Choice:
        """Called by topk_routing_with_score_function in the place of its own top k."""
        assert default_compute_topk is not None

        def native() -> Choice:
            return default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)

        routes = _current.get()
        return native() if routes is None else routes.choose(self.layer, scores, native)


def attach_hooks(models: Sequence[torch.nn.Module]) -> tuple[int, ...]:
    """Give every router of a policy's chunks its hook; the layer numbers on this rank, from 1 over
    all stages. Routers of multi-token-prediction layers keep their own way: they are no part of
    the policy whose log-probs are trained on."""
    layers = []
    for name, module in chain.from_iterable(model.named_modules() for model in models):
        # newer routers know that they predict further tokens; all can be told by where they are
        further = ".mtp." in f".{name}." or getattr(module, "is_mtp_layer", False)
        if not isinstance(module, Router) or further:
            continue
        assert isinstance(module, TopKRouter), f"{type(module).__name__} has no place for a hook"
        assert not module.config.moe_router_fusion, "a fused router never asks its hook"
        kind = module.routing_type
        assert kind not in NEVER_ASKING, f"{kind} routing never asks its hook"
        module.router_replay = RouterHook(module.layer_number)
        layers.append(module.layer_number)
    assert len(set(layers)) == len(layers), f"two routers of one layer number: {layers}"
    return tuple(sorted(layers))
