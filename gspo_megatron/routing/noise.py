"""Noise on the routers' scores while rolling out: a stand-in for an engine that computes otherwise.

A rollout engine of its own, or of a lower precision, sends some tokens to other experts than the
trainer does. The engine here runs the trainer's own weights and agrees with it to rounding; noise
of a chosen size makes it differ, on any machine, by an amount that is known.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from gspo_megatron.routing.hooks import Choice, Routes, routed
from gspo_megatron.routing.replay import Recording

# (layer, experts) -> [tokens, experts] float64, uniform in (0, 1). What they depend on is the
# engine's to say: it knows which tokens these are.
Numbers = Callable[[int, int], Tensor]


class RouterNoise:
    """Contexts for forward passes whose routers see noisy scores."""

    def __init__(self, std: float) -> None:
        assert std > 0, std
        self.std = std

    @contextlib.contextmanager
    def __call__(self, numbers: Numbers, *, record: bool) -> Iterator[dict[int, Tensor]]:
        """The experts [tokens, k] that forward passes inside choose, by layer, if wanted."""
        recording = Recording() if record else None
        with routed(_Noisy(self.std, numbers, recording)):
            yield {} if recording is None else recording.experts


class _Noisy:
    """Adds Gaussian noise to the scores; then `inner`, or else the router, chooses by them."""

    def __init__(self, std: float, numbers: Numbers, inner: Routes | None) -> None:
        self._std, self._numbers, self._inner = std, numbers, inner

    def choose(self, layer: int, scores: Tensor, native: Callable[[], Choice]) -> Choice:
        """See Routes.choose."""
        assert not torch.is_grad_enabled(), "router noise is for rollouts alone"
        noise = self._std * normal(self._numbers(layer, scores.shape[-1]))
        # In place: `native` reads the same tensor, by whatever rule its router has.
        scores.add_(noise.to(scores.dtype))
        return native() if self._inner is None else self._inner.choose(layer, scores, native)


def normal(uniform: Tensor) -> Tensor:
    """Standard normal numbers from uniform ones in (0, 1), by the inverse distribution."""
    return math.sqrt(2.0) * torch.erfinv(2.0 * uniform - 1.0)
