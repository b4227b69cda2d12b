"""The interface of a rollout engine, and what is asked of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from gspo_megatron.types import RolloutBatch


@dataclass(frozen=True)
class Sampling:
    """How responses are drawn. Temperature 0 is greedy decoding; its log-probs are those of
    temperature 1."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: no limit
    stop: tuple[str, ...] = ()  # texts or special tokens; the token that completes one is the last


@dataclass(frozen=True)
class RolloutRequest:
    """Prompts that a step or an evaluation asks responses for, over all ranks."""

    name: str  # unique in the run; evaluations sort before steps, and servers draw in this order
    key: str  # of the configuration, which names the files that the prompts are of
    rows: list[int]  # numbers of the prompts in these files
    first: int  # number of the first prompt in the step
    per_prompt: int  # responses to each
    sampling: Sampling
    seed: int  # with the number of a sample it decides all of its randomness
    version: int  # steps that the weights have made with which to draw, or more


@dataclass(frozen=True)
class Requests:
    """Prompts of this rank and how many responses to draw for each.

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
    """Draws responses with the policy's current weights."""

    def generate(self, requests: Requests, sampling: Sampling, seed: int) -> RolloutBatch:
        """All responses of this rank's requests, in the order of `Requests.sample_indices`.

        Every rank calls it at the same time, even without requests. The same seed and sample index
        draw the same response from the same weights on any layout, up to rounding.
        """
        ...

    def update_weights(self) -> None:
        """Take over the policy's weights after an optimizer step."""
        ...
