"""Responses with their rewards and advantages: what a step learns from."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from gspo_megatron.data.tokenizers import Tokenizer
from gspo_megatron.objectives.advantages import zero_spread_groups
from gspo_megatron.platform.groups import model_replica
from gspo_megatron.rewards.registry import Reward, score
from gspo_megatron.rollout.engine import Requests, RolloutEngine, Sampling
from gspo_megatron.train.metrics import StepFigures
from gspo_megatron.types import Prompt, RolloutBatch, Sample


@dataclass
class Experience:
    """This rank's share of a step's responses, scored."""

    batch: RolloutBatch
    rewards: Tensor  # [num_sequences] float64
    metrics: dict[str, float]  # over all ranks
    num_tokens: int  # response tokens over all ranks
    rollout_seconds: float


class ExperienceCollector:
    """Samples responses with a rollout engine and scores them."""

    def __init__(
        self,
        engine: RolloutEngine,
        tokenizer: Tokenizer,
        reward: Reward,
        device: torch.device,
    ) -> None:
        self.engine, self.tokenizer, self.reward = engine, tokenizer, reward
        self.device = device
        self.data_group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        self.replica, self.scorer = model_replica()

    def collect(
        self, prompts: Sequence[Prompt], responses_per_prompt: int, sampling: Sampling, seed: int
    ) -> Experience:
        """`prompts` are the whole step's, the same on every rank; data ranks take every
        `data_size`-th of them, so that each holds whole groups."""
        start = time.perf_counter()
        batch, mine = self._generate(prompts, responses_per_prompt, sampling, seed)
        rewards = self._score(batch, mine, responses_per_prompt)
        metrics, num_tokens = self._figures(batch, rewards)
        seconds = time.perf_counter() - start
        return Experience(batch, rewards, metrics, num_tokens, seconds)

    def evaluate(
        self, prompts: Sequence[Prompt], sampling: Sampling, seed: int
    ) -> dict[str, float]:
        """Mean reward of one response a prompt, and accuracy: the share with full reward (1)."""
        batch, mine = self._generate(prompts, 1, sampling, seed)
        rewards = self._score(batch, mine, 1)
        figures = StepFigures(self.device)
        count = rewards.new_tensor(float(len(rewards)))
        figures.add_means(
            {
                "evaluation/reward": torch.stack([rewards.sum(), count]),
                "evaluation/accuracy": torch.stack([(rewards >= 1.0).sum().double(), count]),
            }
        )
        return figures.reduce(self.data_group)

    def samples(
        self, experience: Experience, prompts: Sequence[Prompt], count: int
    ) -> list[Sample]:
        """The first `count` of this rank's responses as text."""
        texts = self._responses(experience.batch, count)
        groups = experience.batch.group_index[:count].tolist()
        truncated = experience.batch.truncated[:count].tolist()
        return [
            _sample(prompts[group], text, cut)
            for group, text, cut in zip(groups, texts, truncated, strict=True)
        ]

    def _generate(
        self, prompts: Sequence[Prompt], per_prompt: int, sampling: Sampling, seed: int
    ) -> tuple[RolloutBatch, list[Prompt]]:
        numbers = range(self.data_group.rank(), len(prompts), self.data_group.size())
        mine = [prompts[n] for n in numbers]
        requests = Requests([p.token_ids for p in mine], list(numbers), per_prompt)
        return self.engine.generate(requests, sampling, seed), mine

    def _score(self, batch: RolloutBatch, mine: Sequence[Prompt], per_prompt: int) -> Tensor:
        """One rank of a model replica scores (a reward may be slow, or not deterministic)."""
        rewards = torch.zeros(len(mine) * per_prompt, dtype=torch.float64, device=self.device)
        if dist.get_rank() == self.scorer:
            texts = self._responses(batch, len(rewards))
            truncated = batch.truncated.tolist()
            scores = [
                score(self.reward, _sample(mine[i // per_prompt], text, truncated[i]))
                for i, text in enumerate(texts)
            ]
            rewards = torch.tensor(scores, dtype=torch.float64, device=self.device)
        if self.replica.size() > 1:
            dist.broadcast(rewards, src=self.scorer, group=self.replica)
        return rewards

    def _responses(self, batch: RolloutBatch, count: int) -> list[str]:
        tokens = batch.tokens.tolist()
        texts, start = [], 0
        prompt_lengths = batch.prompt_lengths[:count].tolist()
        response_lengths = batch.response_lengths[:count].tolist()
        for prompt, response in zip(prompt_lengths, response_lengths, strict=True):
            ids = tokens[start + prompt : start + prompt + response]
            start += prompt + response
            if ids and ids[-1] == self.tokenizer.eos_id:
                ids.pop()
            texts.append(self.tokenizer.decode(ids))
        return texts

    def _figures(self, batch: RolloutBatch, rewards: Tensor) -> tuple[dict[str, float], int]:
        figures = StepFigures(self.device)
        count = rewards.new_tensor(float(len(rewards)))

        def mean(values: Tensor) -> Tensor:
            return torch.stack([values.double().sum(), count])

        tokens = batch.response_lengths.sum().double()
        figures.add_means(
            {
                "reward/mean": mean(rewards),
                "reward/squared": mean(rewards**2),
                "reward/zero_spread_groups": zero_spread_groups(rewards, batch.group_index),
                "response/length_mean": mean(batch.response_lengths),
                "response/truncated": mean(batch.truncated),
                "tokens": torch.stack([tokens, torch.ones_like(tokens) / self.data_group.size()]),
            }
        )
        metrics = figures.reduce(self.data_group)
        squared = metrics.pop("reward/squared")
        metrics["reward/std"] = math.sqrt(max(squared - metrics["reward/mean"] ** 2, 0.0))
        return metrics, round(metrics.pop("tokens"))


def _sample(prompt: Prompt, response: str, truncated: bool) -> Sample:
    return Sample(prompt.text, prompt.answer, response, bool(truncated), prompt.fields)
