"""What an engine with noisy routers needs: where the noise goes in, and its random numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from gspo_megatron.rollout.sampling import uniforms


class RouterNoise(Protocol):
    """A context in which forward passes have noise on their routers' scores, made of what
    `numbers` gives for (layer, experts): [tokens, experts] float64, uniform in (0, 1).

    Yields the experts [tokens, k] of each layer, by number; nothing unless `record`.
    """

    def __call__(
        self, numbers: Callable[[int, int], Tensor], *, record: bool
    ) -> AbstractContextManager[Mapping[int, Tensor]]: ...


@dataclass(frozen=True)
class RouterRandomness:
    """Random numbers for the routers' tokens. As those that draw tokens, they depend on seed,
    sample and position alone: not on the layout, nor on what else is in the batch."""

    seed: int
    samples: Tensor  # [sequences]; of a prompt, the first of its samples

    def at(self, rows: Tensor | slice) -> RouterRandomness:
        """Of some of the sequences."""
        return RouterRandomness(self.seed, self.samples[rows])

    def numbers(self, positions: Tensor) -> Callable[[int, int], Tensor]:
        """positions [sequences, length] -> what RouterNoise takes."""
        # 2^20 positions and 2^24 samples; tokens in the order in which routers see them: the first
        # of all sequences, then the second
        tokens = ((self.samples[:, None] << 20) + positions).t().flatten()
        # ~seed: other numbers than those that draw the tokens
        return lambda layer, experts: uniforms(~self.seed, tokens + (layer << 44), experts)
