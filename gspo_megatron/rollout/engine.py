"""What is asked of rollouts, and the interfaces that answer: an engine generates tokens, a source
gives responses with their scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from gspo_megatron.config.schema import RolloutSection
from gspo_megatron.rewards.scoring import FailedCalls
from gspo_megatron.rollout.episodes import GroupScorer
from gspo_megatron.rollout.types import RolloutGroup
from gspo_megatron.types import Prompt, RolloutBatch


@dataclass(frozen=True)
class Sampling:
    """How tokens are sampled. Temperature 0 is greedy decoding; its log-probs are those of
    temperature 1."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: no limit
    stop: tuple[str, ...] = ()  # texts or special tokens; the token that completes one is the last

    @classmethod
    def of(cls, rollout: RolloutSection) -> Sampling:
        """That of a run's steps."""
        return cls(
            rollout.max_response_tokens,
            rollout.temperature,
            rollout.top_p,
            rollout.top_k,
            tuple(rollout.stop),
        )


@dataclass(frozen=True)
class RolloutRequest:
    """Prompts that a step or an evaluation asks responses for, over all ranks."""

    name: str  # unique in the run; evaluations sort before steps, and servers work in this order
    key: str  # of the configuration, which names the files that the prompts are of
    rows: list[int]  # numbers of the prompts in these files
    first: int  # number of the first prompt in the step
    per_prompt: int  # responses to each
    sampling: Sampling
    seed: int  # with the number of a sample it decides all of its randomness
    version: int  # steps that the weights have made that generate, or more


@dataclass(frozen=True)
class Requests:
    """Prompts of this rank and how many responses to generate for each.

    Responses are numbered over all ranks: response j of the prompt with group index g is sample
    g * responses_per_prompt + j. Seed and sample index decide all of its randomness.
    """

    prompts: Sequence[Sequence[int]]  # token ids
    group_index: Sequence[int]  # the prompts' numbers in the step, over all ranks
    responses_per_prompt: int = 1
    # of each prompt's responses, at most `Sampling.max_tokens`; None: as many
    max_tokens: Sequence[int] | None = None
    router_noise: bool = True  # that of the engine, if it has any

    def sample_indices(self) -> list[int]:
        """[prompts * responses], in the order in which the engine returns them."""
        per_prompt = self.responses_per_prompt
        return [g * per_prompt + j for g in self.group_index for j in range(per_prompt)]


class RolloutEngine(Protocol):
    """Generates responses with the policy's current weights."""

    def generate(self, requests: Requests, sampling: Sampling, seed: int) -> RolloutBatch:
        """All responses of this rank's requests, in the order of `Requests.sample_indices`.

        Every rank calls it at the same time, even without requests. The same seed and sample index
        give the same response of the same weights on any layout, up to rounding.
        """
        ...

    def update_weights(self) -> None:
        """Take over the policy's weights after an optimizer step."""
        ...


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
        prompts: Mapping[int, Prompt],
        scorer: GroupScorer,
        *,
        router_noise: bool,
    ) -> RolloutShare:
        """Responses to this rank's share of the request's prompts, which `prompts` has by their
        numbers in the step; router_noise: that of the engine, if it has any. Raises EpisodeError,
        RewardError and RolloutError, on all ranks."""
        ...

    def take_weights(self, version: int) -> dict[str, float]:
        """Generate with the policy's present weights from now on; `version`: steps that it has
        made. Returns metrics."""
        ...

    def after_checkpoint(self, step: int) -> None:
        """The run is saved after `step`: what was kept for a repetition of it may go."""
        ...

    def go_back(self) -> None:
        """The run goes back to an earlier step: nothing that was begun is wanted, and the weights
        of that step are taken next."""
        ...

    def close(self) -> None:
        """The run ends."""
        ...
