"""Adds noise to the routers' scores during rollouts, to imitate a separate rollout engine.

A separate engine chooses other experts than the trainer for some tokens. The engine that is the
trained model itself agrees with the trainer up to rounding. With noise, this engine differs from
the trainer by a known amount.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Generator

import torch
from torch import Tensor

from gspo_megatron.routing.hooks import Choice, Routes, routed
from gspo_megatron.routing.replay import Recording

# (layer, number of experts) -> [tokens, experts] float64, uniform in (0, 1). The engine provides
# this function, because it knows which tokens are in the pass (RouterRandomness in
# rollout/megatron/sampling.py).
Numbers = Callable[[int, int], Tensor]


@contextlib.contextmanager
def noisy_routers(std: float, numbers: Numbers, *, record: bool) -> Generator[dict[int, Tensor]]:
    """Add noise to the scores of forward passes in this context.

    Yields the chosen experts [tokens, k] by layer number, or an empty dict if `record` is not set.
    """
    recording = Recording() if record else None
    with routed(_Noisy(std, numbers, recording)):
        yield {} if recording is None else recording.experts


class _Noisy:
    """Adds Gaussian noise to the scores. Then `inner` chooses the experts, or the router if there
    is no `inner`."""

    def __init__(self, std: float, numbers: Numbers, inner: Routes | None) -> None:
        self._std, self._numbers, self._inner = std, numbers, inner

    def choose(self, layer: int, scores: Tensor, native: Callable[[], Choice]) -> Choice:
        """See Routes.choose."""
        assert not torch.is_grad_enabled(), "router noise is for rollouts alone"
        noise = self._std * normal(self._numbers(layer, scores.shape[-1]))
        # The noise is added in place, because `native` reads the same tensor.
        scores.add_(noise.to(scores.dtype))
        return native() if self._inner is None else self._inner.choose(layer, scores, native)


def normal(uniform: Tensor) -> Tensor:
    """Turn uniform numbers in (0, 1) into standard normal ones, by the inverse distribution."""
    return math.sqrt(2.0) * torch.erfinv(2.0 * uniform - 1.0)
