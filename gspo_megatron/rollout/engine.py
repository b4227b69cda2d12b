"""Rollout requests and two interfaces: an engine generates tokens, and a source returns scored
responses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from gspo_megatron.config.schema import RolloutSection
from gspo_megatron.rewards.scoring import FailedCalls
from gspo_megatron.rollout.episodes import GroupScorer
from gspo_megatron.rollout.reward_model import ModelScores
from gspo_megatron.rollout.types import RolloutGroup
from gspo_megatron.types import Prompt, RolloutBatch


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters. Temperature 0 means greedy decoding with log-probs at temperature 1."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: no limit
    # Texts or special tokens. A response ends with the token that completes one of these.
    stop: tuple[str, ...] = ()

    @classmethod
    def of(cls, rollout: RolloutSection) -> Sampling:
        """Return the sampling parameters of RL steps."""
        return cls(
            rollout.max_response_tokens,
            rollout.temperature,
            rollout.top_p,
            rollout.top_k,
            tuple(rollout.stop),
        )


@dataclass(frozen=True)
class RolloutRequest:
    """The prompts of a step or an evaluation, over all ranks."""

    name: str  # unique in the run; evaluations sort before steps, and servers work in this order
    key: str  # the configuration key that names the prompt files
    rows: list[int]  # numbers of the prompts in these files
    first: int  # the number that this request's first prompt has in the step
    per_prompt: int  # number of responses to each prompt
    sampling: Sampling
    seed: int  # seed and sample number together decide all randomness of a sample
    version: int  # the lowest weights version that may generate

    @property
    def is_learnt(self) -> bool:
        """Whether the policy learns from the responses, unlike those of an evaluation."""
        return self.key == "data.prompts"


@dataclass(frozen=True)
class Requests:
    """The prompts of this rank, and how many responses to generate for each.

    Responses are numbered over all ranks: response j of the prompt with group index g is sample
    g * responses_per_prompt + j. Seed and sample index decide all randomness of a sample.
    """

    prompts: Sequence[Sequence[int]]  # token ids
    group_index: Sequence[int]  # the prompts' numbers in the step, over all ranks
    responses_per_prompt: int = 1
    # token limit for the responses to each prompt, at most `Sampling.max_tokens`; None: the limit
    # of all prompts is `Sampling.max_tokens`
    max_tokens: Sequence[int] | None = None
    router_noise: bool = True  # False: switch off the engine's router noise, if it has any

    def sample_indices(self) -> list[int]:
        """Return the sample indexes [prompts * responses] in the engine's output order."""
        per_prompt = self.responses_per_prompt
        return [g * per_prompt + j for g in self.group_index for j in range(per_prompt)]


class RolloutEngine(Protocol):
    """Generates responses with the policy's current weights."""

    def generate(self, requests: Requests, sampling: Sampling, seed: int) -> RolloutBatch:
        """Generate this rank's responses, in the order of `Requests.sample_indices`.

        All ranks call this method together, even a rank without requests. With equal weights, the
        same seed and sample index give the same response on any layout, up to rounding.
        """

    def update_weights(self) -> None:
        """Load the policy's weights after an optimizer step."""


@dataclass
class ModelWork:
    """What a reward model has computed for the responses of one share, for the metrics."""

    answers: ModelScores
    repeated: np.ndarray  # [num_sequences] float64: share of repeated text in the response
    running: tuple[float, float] | None  # running mean and standard deviation; None: not kept


@dataclass
class RolloutShare:
    """This rank's share of a request: all responses to some of its prompts."""

    group: RolloutGroup
    failed_calls: FailedCalls  # failed reward calls and episodes on all ranks
    reward_seconds: float  # wall seconds of scoring, on the slowest rank or in the rollout service
    staleness: np.ndarray | None = None  # [sampled tokens], in steps; None: no token is stale
    model: ModelWork | None = None  # None: there is no reward model


class RolloutSource(Protocol):
    """Returns scored responses. Every rank has a source, and all ranks call each method
    together."""

    # Called with the progress of sampling or scoring, as a text to show.
    report: Callable[[str], None]

    def begin(self, request: RolloutRequest) -> None:
        """Announce a request that `take` will need soon."""

    def take(
        self,
        request: RolloutRequest,
        prompts: Mapping[int, Prompt],
        scorer: GroupScorer,
        *,
        router_noise: bool,
    ) -> RolloutShare:
        """Return responses to this rank's share of the request's prompts.

        prompts: this rank's prompts by their numbers in the step; router_noise: False switches off
        the engine's noise, if it has any. Raises EpisodeError, RewardError and RolloutError, on
        all ranks.
        """

    def take_weights(self, version: int) -> dict[str, float]:
        """Generate with the policy's current weights from now on. Returns metrics.

        version: the number of steps that these weights have been trained for.
        """

    def after_checkpoint(self, step: int) -> None:
        """Delete the data kept for repeating steps up to `step`: `step` now has a checkpoint."""

    def hand_over(self) -> Any:
        """Return resources that the source of the next phase takes over, or None. `close` does not
        free these resources."""

    def close(self) -> None:
        """Free the resources at the end of the run or of a phase."""
