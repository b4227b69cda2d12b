"""Hooks on the routers: with them, a caller can choose the experts in a forward pass.

Megatron-Core's TopKRouter gets the experts from its `router_replay` object, if it has one. The
stock object keeps one process-wide list. A second model, virtual stages or recomputation mix up
this list. Here each router has a hook that knows only its layer number. The running forward pass
sets a context variable that tells the hook what to do; recomputation restores the variable
(platform/megatron_fixes.py).
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

# Load-balancing types of Megatron-Core that choose experts without calling the hook.
NEVER_ASKING = ("sinkhorn", "quantile_balancing")

Choice = tuple[Tensor, Tensor]  # scores [tokens, k] of the chosen experts, experts [tokens, k]


class Routes(Protocol):
    """Chooses the experts at each router in the forward pass of one micro-batch."""

    def choose(self, layer: int, scores: Tensor, native: Callable[[], Choice]) -> Choice:
        """Choose the experts of a layer's tokens.

        scores: [tokens, experts], from which the router takes the top k; native: makes the
        router's own choice.
        """


_current: ContextVar[Routes | None] = ContextVar("routes", default=None)


@contextlib.contextmanager
def routed(routes: Routes | None) -> Generator[None]:
    """Let `routes` choose the experts in forward passes in this context, and when these passes are
    recomputed later."""
    token = _current.set(routes)
    try:
        yield
    finally:
        _current.reset(token)


class RouterHook:
    """Takes the place of Megatron-Core's RouterReplay in a TopKRouter."""

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
        """Return a choice; topk_routing_with_score_function calls this instead of its own top k."""
        assert default_compute_topk is not None

        def native() -> Choice:
            return default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)

        routes = _current.get()
        return native() if routes is None else routes.choose(self.layer, scores, native)


def attach_hooks(models: Sequence[torch.nn.Module]) -> tuple[int, ...]:
    """Attach a hook to every router of a policy's chunks, and return their layer numbers.

    Layer numbers count from 1 over all pipeline stages. (Layers that predict further tokens, which
    have numbers of their own, are refused in config/megatron_fields.py.)
    """
    layers = []
    for module in chain.from_iterable(model.modules() for model in models):
        if not isinstance(module, Router):
            continue
        assert isinstance(module, TopKRouter), f"{type(module).__name__} has no place for a hook"
        assert not module.config.moe_router_fusion, "a fused router never asks its hook"
        kind = module.routing_type
        assert kind not in NEVER_ASKING, f"{kind} routing never asks its hook"
        module.router_replay = RouterHook(module.layer_number)
        layers.append(module.layer_number)
    assert len(set(layers)) == len(layers), f"two routers of one layer number: {layers}"
    return tuple(sorted(layers))
