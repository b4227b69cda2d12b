"""Random sequences with ratios and advantages that reach every case of an objective."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gspo_megatron.config.objectives import resolve_objective
from gspo_megatron.config.schema import ObjectiveSection


@dataclass(frozen=True)
class SyntheticBatch:
    """The sequences of a step, the same on every rank."""

    tokens: list[Tensor]  # [length] int64 each, prompt and response
    response_lengths: list[int]
    advantages: list[float]
    log_ratios: list[Tensor]  # [response] float32 each: the intended log pi - log pi_old
    routes: list[Tensor] | None = None  # [length, all layers, k] each: a rollout's routes
    masks: list[Tensor] | None = None  # [response] bool each: tokens to learn from; None: all
    token_advantages: list[Tensor] | None = None  # [response] float32 each, instead of `advantages`
    # (prompt, response) tokens of each branch of each sequence; None: one branch each.
    branches: list[list[tuple[int, int]]] | None = None
    # the number of each sequence's prompt; None: two neighbours have the same number
    groups: list[int] | None = None

    def prompts(self) -> list[tuple[int, int]]:
        """Return for each sequence the number of its prompt, and the prompt's tokens."""
        lengths = [len(t) - r for t, r in zip(self.tokens, self.response_lengths, strict=True)]
        if self.branches is not None:
            lengths = [each[0][0] for each in self.branches]
        groups = self.groups or [number // 2 for number in range(len(lengths))]
        return list(zip(groups, lengths, strict=True))

    def in_response(self) -> list[Tensor] | None:
        """Return [length] bool for each sequence, as in RolloutBatch; None without branches."""
        if self.branches is None:
            return None
        kinds = [torch.arange(2 * len(each)) % 2 == 1 for each in self.branches]
        return [
            kind.repeat_interleave(torch.tensor(each).flatten())
            for kind, each in zip(kinds, self.branches, strict=True)
        ]

    def masked_lengths(self) -> list[int]:
        """Return [num_sequences]: the number of response tokens to learn from."""
        if self.masks is None:
            return self.response_lengths
        return [int(mask.sum()) for mask in self.masks]


def synthetic_batch(
    objective: ObjectiveSection,
    vocab_size: int,
    *,
    num_sequences: int = 13,
    shortest: int = 2,
    longest: int = 24,
    seed: int = 1,
) -> SyntheticBatch:
    """Return random sequences of different lengths.

    Their ratios lie inside the objective's clip range, below it and above it, but never near a
    bound. In each case there are advantages of both signs. The advantages are not centred: the loss
    of a centred batch is a difference of nearly equal numbers, with a large share of rounding
    errors.
    """
    assert 2 <= shortest <= longest
    generator = torch.Generator().manual_seed(seed)
    recipe = resolve_objective(objective)
    numbers = recipe.parameters
    # The log-ratios at which clipping begins.
    low = -numbers.get("log_clip", -math.log1p(-numbers.get("clip_low", 0.2)))
    high = numbers.get("log_clip", math.log1p(numbers.get("clip_high", 0.2)))
    levels = torch.tensor([2.5 * low, 0.5 * low, 0.5 * high, 2.5 * high])
    batch = SyntheticBatch([], [], [], [])
    for number in range(num_sequences):
        length = int(torch.randint(shortest, longest + 1, (), generator=generator))
        response = int(torch.randint(1, length, (), generator=generator))
        if recipe.ratio != "token":
            noise = 0.02 * torch.randn(response, generator=generator)
            scale = 1 / response if "product" in recipe.ratio else 1.0
            log_ratios = levels[number % 4] * scale + noise - noise.mean()
        else:
            log_ratios = levels[torch.randint(0, 4, (response,), generator=generator)]
        size = 0.5 + float(torch.rand((), generator=generator))
        positive = number // 4 % 2 == 0
        batch.tokens.append(torch.randint(0, vocab_size, (length,), generator=generator))
        batch.response_lengths.append(response)
        batch.log_ratios.append(log_ratios)
        batch.advantages.append(2.0 * size if positive else -size)
    return batch
