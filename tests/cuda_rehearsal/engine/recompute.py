"""Recomputation of activations in the backward pass, and the ranks' random number generators."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as of_torch

from tests.cuda_rehearsal.engine.precision import fp8_autocast, region


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    for name in ("distribute_saved_activations", "get_rng_state_tracker", "tp_group"):
        kwargs.pop(name, None)
    kept, calls = (region.enabled, region.recipe, region.group), []

    def run(*tensors: Any) -> Any:
        calls.append(None)
        if len(calls) == 1:
            return function(*tensors, **kwargs)
        region.recomputing, before = True, region.recomputing
        try:
            with fp8_autocast(*kept):
                return function(*tensors, **kwargs)
        finally:
            region.recomputing = before

    return of_torch(run, *args, use_reentrant=True, preserve_rng_state=False)


class CudaRNGStatesTracker:
    """Keeps named states of the device's random number generator."""

    def __init__(self) -> None:
        self.states_: dict[str, torch.Tensor] = {}

    def reset(self) -> None:
        self.states_ = {}

    def get_states(self) -> dict[str, torch.Tensor]:
        return dict(self.states_)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        self.states_ = states


def get_cpu_offload_context(enabled: bool) -> tuple[Any, Any]:
    """Return placeholders. Megatron-Core always calls this, but uses the result only if
    `enabled`."""
    assert not enabled, "the stand-in does not offload"
    return contextlib.nullcontext(), lambda tensor: tensor
