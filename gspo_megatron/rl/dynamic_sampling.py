"""Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): groups without a spread of rewards have
no gradient; they make room for further prompts.

Which groups are trained on follows from their numbers in the step and from who has a spread, which
all ranks know: the choice is the same on every layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from gspo_megatron.rl.scoring import Scores
from gspo_megatron.types import RolloutBatch

Flat = TypeVar("Flat", RolloutBatch, Scores)  # records of flat tensors


@dataclass
class Selection:
    """The groups that a step trains on, out of those sampled so far."""

    wanted: int  # groups
    max_refills: int
    rounds: int = 0
    has_spread: list[bool] = field(default_factory=list)  # by the groups' numbers in the step

    def add(self, has_spread: Sequence[bool]) -> None:
        """One more round of groups, in their order."""
        self.rounds += 1
        self.has_spread += has_spread

    @property
    def wants_more(self) -> bool:
        """Whether another round of prompts is to be drawn."""
        return sum(self.has_spread) < self.wanted and self.rounds <= self.max_refills

    def groups(self) -> list[int]:
        """Their numbers: the first `wanted` with spread, or fewer where there are no more. Where
        there are none at all, the first round, so that the step has something to compute with."""
        chosen = [number for number, has in enumerate(self.has_spread) if has]
        return chosen[: self.wanted] or list(range(self.wanted))

    def metrics(self) -> dict[str, float]:
        """`rollout/no_spread` is 1 for a step without a group that had any: it learns nothing."""
        return {
            "rollout/refills": float(self.rounds - 1),
            "rollout/groups_dropped": float(len(self.has_spread) - len(self.groups())),
            "rollout/no_spread": float(not any(self.has_spread)),
        }


def select_sequences(batch: RolloutBatch, rows: Tensor) -> RolloutBatch:
    """The sequences that `rows` [num_sequences] bool marks."""
    responses = rows.repeat_interleave(batch.response_lengths)
    tokens = rows.repeat_interleave(batch.prompt_lengths + batch.response_lengths)
    of_tokens = {"tokens": tokens, "logprobs": responses, "routes": tokens}
    return RolloutBatch(
        **{
            name: None if value is None else value[of_tokens.get(name, rows)]
            for name, value in vars(batch).items()
        }
    )


def join(parts: Sequence[Flat]) -> Flat:
    """Those of several rounds end to end."""
    if len(parts) == 1:
        return parts[0]
    columns = {name: [getattr(part, name) for part in parts] for name in vars(parts[0])}
    return type(parts[0])(
        **{
            name: None if values[0] is None else torch.cat(values)
            for name, values in columns.items()
        }
    )
