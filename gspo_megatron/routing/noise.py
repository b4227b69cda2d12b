"""Noise on the routers' scores during rollouts. It imitates an engine that computes differently.

A separate engine sends some tokens to other experts than the trainer does; the engine of this
package agrees with it up to rounding. Noise makes the two differ by a known amount.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Generator

import torch
from torch import Tensor

from gspo_megatron.routing.hooks import Choice, Routes, routed
from gspo_megatron.routing.replay import Recording

# (layer, experts) -> [tokens, experts] float64, uniform in (0, 1). The engine provides it, because
# the engine knows which tokens pass (rollout/megatron/sampling.py, RouterRandomness).
Numbers = Callable[[int, int], Tensor]


@contextlib.contextmanager
def noisy_routers(std: float, numbers: Numbers, *, record: bool) -> Generator[dict[int, Tensor]]:
    """Forward passes inside see noisy scores. Yields the experts [tokens, k] that they choose, by
    layer number; an empty dict unless `record`."""
    recording = Recording() if record else None
    with routed(_Noisy(std, numbers, recording)):
        yield {} if recording is None else recording.experts


class _Noisy:
    """Adds Gaussian noise to the scores. Then `inner` chooses by them, or the router itself."""

    def __init__(self, std: float, numbers: Numbers, inner: Routes | None) -> None:
        self._std, self._numbers, self._inner = std, numbers, inner

    def choose(self, layer: int, scores: Tensor, native: Callable[[], Choice]) -> Choice:
        """See Routes.choose."""
        assert not torch.is_grad_enabled(), "router noise is for rollouts alone"
        noise = self._std * normal(self._numbers(layer, scores.shape[-1]))
        # In place, because `native` reads the same tensor.
        scores.add_(noise.to(scores.dtype))
        return native() if self._inner is None else self._inner.choose(layer, scores, native)


def normal(uniform: Tensor) -> Tensor:
    """Standard normal numbers from uniform ones in (0, 1), by the inverse distribution."""
    return math.sqrt(2.0) * torch.erfinv(2.0 * uniform - 1.0)
