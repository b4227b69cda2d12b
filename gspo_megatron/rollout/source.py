"""Where a step gets its responses from: the policy itself, or servers. All are scored there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from gspo_megatron.platform.groups import data_parallel_group
from gspo_megatron.rewards.scoring import FailedCalls
from gspo_megatron.rollout.engine import RolloutRequest
from gspo_megatron.rollout.episodes import GroupScorer
from gspo_megatron.rollout.types import RolloutGroup
from gspo_megatron.types import Prompt


@dataclass
class RolloutShare:
    """This rank's share of a request: whole groups, of every `data_size`-th of its prompts."""

    group: RolloutGroup
    failed_calls: FailedCalls  # calls of the reward function, and episodes, on all ranks
    reward_seconds: float  # wall seconds of scoring: of the slowest rank, or of the service
    # [sampled tokens] updates that the weights have missed that generated a token; None: none
    staleness: np.ndarray | None = None


class RolloutSource(Protocol):
    """Scored responses. Every rank has one, and all ranks call everything."""

    report: Callable[[str], None]  # is told how far sampling or scoring is, for people

    def begin(self, request: RolloutRequest) -> None:
        """The request is wanted soon."""
        ...

    def take(
        self,
        request: RolloutRequest,
        prompts: Sequence[Prompt],
        scorer: GroupScorer,
        *,
        router_noise: bool,
    ) -> RolloutShare:
        """Responses to this rank's share of the request's prompts; router_noise: that of the
        engine, if it has any. Raises EpisodeError, RewardError and RolloutError, on all ranks."""
        ...

    def take_weights(self, version: int) -> dict[str, float]:
        """Generate with the policy's present weights from now on; `version`: steps that it has
        made. Returns metrics."""
        ...

    def after_checkpoint(self, step: int) -> None:
        """The run is saved after `step`: what was kept for a repetition of it may go."""
        ...

    def close(self) -> None:
        """The run ends."""
        ...


def share_of_rank(request: RolloutRequest) -> list[int]:
    """The numbers in the step of the request's prompts that this rank holds responses to."""
    group = data_parallel_group()
    numbers = range(request.first, request.first + len(request.rows))
    return [number for number in numbers if number % group.size() == group.rank()]
