"""Known mistakes of other implementations of Routing Replay. Each is a patch of the code under
test."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from megatron.core.tensor_parallel.random import CheckpointFunction
from megatron.core.transformer.moe import router as router_module
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from gspo_megatron.batching import micro_batches as schedule
from gspo_megatron.routing import hooks, replay
from gspo_megatron.routing.hooks import Choice, RouterHook, Routes, attach_hooks
from gspo_megatron.routing.replay import MicroBatchRoutes, Recording, Replaying, RouteTable

Mistake = contextlib.AbstractContextManager


@contextlib.contextmanager
def routers_numbered_by_construction(models: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Numbers routers in the order of their construction, as Megatron-Core's process-wide list
    does. `models` were built before the policy."""
    numbers = itertools.count(1)

    class Numbered(RouterHook):
        def __init__(self, layer: int) -> None:
            super().__init__(next(numbers))

    with mock.patch.object(hooks, "RouterHook", Numbered):
        attach_hooks(models)
        yield


def layers_numbered_within_their_stage() -> Mistake:
    def attach(models: Sequence[torch.nn.Module]) -> tuple[int, ...]:
        for model in models:
            for number, layer in enumerate(model.decoder.layers, 1):
                for module in layer.modules():
                    if isinstance(module, TopKRouter):
                        module.layer_number = number
        return attach_hooks(models)

    return mock.patch.object(replay, "attach_hooks", attach)


@contextlib.contextmanager
def fused_routers() -> Iterator[None]:
    """The routing function returns before it calls the hook."""
    native = router_module.topk_routing_with_score_function

    def fused(*args: Any, **kwargs: Any) -> Any:
        return native(*args, **kwargs | {"router_replay": None})

    with mock.patch.object(router_module, "topk_routing_with_score_function", fused):
        yield


def recomputation_without_context() -> Mistake:
    """Recomputation loses the context, as in stock Megatron-Core."""
    stock = staticmethod(CheckpointFunction.forward.__wrapped__)
    return mock.patch.object(CheckpointFunction, "forward", stock)


@contextlib.contextmanager
def newest_routes_only() -> Iterator[None]:
    """One variable holds the routes of the pass that began last. Recomputation reads this variable,
    too."""
    newest: list[Routes | None] = [None]

    @contextlib.contextmanager
    def routed(routes: Routes | None) -> Iterator[None]:
        newest[0] = routes
        yield

    class Place:
        def get(self) -> Routes | None:
            return newest[0]

        def set(self, routes: Routes | None) -> Routes | None:
            before, newest[0] = newest[0], routes
            return before

        def reset(self, before: Routes | None) -> None:
            newest[0] = before

    with (
        mock.patch.object(schedule, "routed", routed),
        mock.patch.object(hooks, "_current", Place()),
    ):
        yield


def _replacing(method: Callable[..., Choice]) -> Mistake:
    return mock.patch.object(Replaying, "choose", method)


def replay_of_nothing() -> Mistake:
    """Everything is prepared for replay, but the routers choose for themselves."""
    return _replacing(lambda self, layer, scores, native: native())


def routes_are_never_given_up() -> Mistake:
    return mock.patch.object(MicroBatchRoutes, "_release", return_value=None)


def routes_get_lost() -> Mistake:
    """The routes are not stored with their micro-batch."""
    native = MicroBatchRoutes._keep

    def keep(self: MicroBatchRoutes, mode: str, table: RouteTable) -> None:
        native(self, mode, table)
        self.tables.pop(mode)

    return mock.patch.object(MicroBatchRoutes, "_keep", keep)


def one_layer_is_passed_by() -> Mistake:
    native = Replaying.choose

    def choose(self: Replaying, layer: int, scores: Tensor, own: Any) -> Choice:
        return own() if layer == 2 else native(self, layer, scores, own)

    return _replacing(choose)


def experts_are_recorded_twice() -> Mistake:
    """Experts are already recorded when a pass begins, as if the pass ran twice."""
    native = replay.Recording

    def recording(*args: Any, **kwargs: Any) -> Recording:
        made = native(*args, **kwargs)
        made.experts[1] = torch.zeros((1, 2), dtype=torch.uint8)
        return made

    return mock.patch.object(replay, "Recording", recording)
