"""Responses with their rewards and advantages: what a step learns from."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from gspo_megatron.config import Config
from gspo_megatron.data.tokenizers import Tokenizer
from gspo_megatron.errors import RewardError
from gspo_megatron.objectives.advantages import (
    build_turn_advantages,
    group_mean,
    zero_spread_groups,
)
from gspo_megatron.platform.reduce_metrics import StepMetrics
from gspo_megatron.rewards import Reward, Shaping, name_of
from gspo_megatron.rl.dynamic_sampling import Selection, join, select_sequences
from gspo_megatron.rl.scoring import Scorer, Scores
from gspo_megatron.rollout.engine import Requests, RolloutEngine, Sampling
from gspo_megatron.types import Prompt, RolloutBatch, Sample


@dataclass
class Round:
    """This rank's responses to one draw of prompts, scored."""

    prompts: Sequence[Prompt]  # on all ranks
    first: int  # the first prompt's number in the step
    batch: RolloutBatch
    scores: Scores

    def of_groups(self, numbers: Sequence[int]) -> Round:
        """The responses to these of the step's prompts."""
        groups = self.batch.group_index
        wanted = torch.tensor(numbers, dtype=torch.long, device=groups.device)
        return self.at(torch.isin(groups, wanted))

    def at(self, rows: Tensor) -> Round:
        """The responses that `rows` [num_sequences] bool marks."""
        batch, scores = select_sequences(self.batch, rows), self.scores.select(rows)
        return replace(self, batch=batch, scores=scores)


@dataclass
class Experience:
    """This rank's share of the responses that a step trains on."""

    batch: RolloutBatch
    rewards: Tensor  # [num_sequences] float64, shaped
    token_advantages: Tensor | None  # [response tokens] float32, of rewarded turns; on all ranks
    shown: Round  # the first responses of all, to be written down: not those of a selection
    metrics: dict[str, float]  # over all responses that were sampled, on all ranks
    num_tokens: int  # response tokens, likewise
    rollout_seconds: float


class ExperienceCollector:
    """Samples responses with a rollout engine and scores them."""

    def __init__(
        self,
        config: Config,
        engine: RolloutEngine,
        tokenizer: Tokenizer,
        reward: Reward,
        device: torch.device,
    ) -> None:
        self.config, self.engine, self.tokenizer = config, engine, tokenizer
        self.device = device
        self.data_group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        self.shaping = Shaping(config.reward, config.rollout.max_response_tokens)
        self.scorer = Scorer(reward, self.shaping, device)

    def collect(
        self, draw: Callable[[], Sequence[Prompt]], sampling: Sampling, seed: int
    ) -> Experience:
        """A step's experience on the prompts of `draw`, which gives every rank the same
        `rollout.prompts_per_step` at each call.

        Data ranks take every `data_size`-th prompt, so that each holds whole groups; with dynamic
        sampling they may be left with unequal numbers of them. Raises UserError, on all ranks,
        where rewards of turns are of no use or mixed with others.
        """
        start = time.perf_counter()
        figures = StepMetrics(self.device)
        rounds, selection = self._rounds(draw, figures, sampling, seed)
        metrics, turns_share = self._reduce(figures)
        num_responses = sum(len(each.prompts) for each in rounds) * self.config.rollout.group_size
        first = torch.arange(len(rounds[0].scores.rewards), device=self.device)
        shown = rounds[0].at(first < self.config.logging.samples_per_step)
        if selection is not None:
            metrics |= selection.metrics()
            rounds = [each.of_groups(selection.groups()) for each in rounds]
        batch, scores = join([r.batch for r in rounds]), join([r.scores for r in rounds])
        return Experience(
            batch=batch,
            rewards=scores.shaped,
            token_advantages=self._token_advantages(batch, scores, turns_share),
            shown=shown,
            metrics=metrics,
            num_tokens=round(metrics["response/length_mean"] * num_responses),
            rollout_seconds=time.perf_counter() - start,
        )

    def evaluate(
        self, prompts: Sequence[Prompt], sampling: Sampling, seed: int
    ) -> dict[str, float]:
        """Mean reward of one response a prompt, as the reward function has it, and accuracy: the
        share with full reward (1)."""
        rewards = self._round(prompts, 0, 1, sampling, seed).scores.rewards
        figures = StepMetrics(self.device)
        figures.add_means(
            {
                "evaluation/reward": _mean(rewards),
                "evaluation/accuracy": _mean(rewards >= 1.0),
            }
        )
        return figures.reduce(self.data_group)

    def samples(self, experience: Experience) -> tuple[list[Sample], list[float]]:
        """The first of this rank's responses as text, `logging.samples_per_step` of them, and their
        rewards as the reward function has them."""
        shown = experience.shown
        return self._samples(shown.batch, shown.prompts, shown.first), shown.scores.rewards.tolist()

    def _rounds(
        self,
        draw: Callable[[], Sequence[Prompt]],
        figures: StepMetrics,
        sampling: Sampling,
        seed: int,
    ) -> tuple[list[Round], Selection | None]:
        """The first round, and with dynamic sampling the selection, and of the further rounds the
        groups that it may choose."""
        rollout = self.config.rollout
        selection = None
        if rollout.dynamic_sampling:
            selection = Selection(rollout.prompts_per_step, rollout.max_refills)
        rounds: list[Round] = []
        while not rounds or (selection is not None and selection.wants_more):
            first = sum(len(each.prompts) for each in rounds)
            collected = self._round(draw(), first, rollout.group_size, sampling, seed)
            self._add_figures(figures, collected)
            if selection is not None:
                has_spread = self._groups_with_spread(collected)
                selection.add(has_spread)
                if rounds:  # what cannot be chosen need not be held
                    chosen = [first + n for n, has in enumerate(has_spread) if has]
                    collected = collected.of_groups(chosen)
            rounds.append(collected)
        return rounds, selection

    def _round(
        self, prompts: Sequence[Prompt], first: int, per_prompt: int, sampling: Sampling, seed: int
    ) -> Round:
        """`first` is the number of the first prompt in the step. With it go the numbers of the
        samples, which stay unique, and the random numbers, which depend on nothing else."""
        rank, size = self.data_group.rank(), self.data_group.size()
        numbers = [n for n in range(first, first + len(prompts)) if n % size == rank]
        requests = Requests([prompts[n - first].token_ids for n in numbers], numbers, per_prompt)
        batch = self.engine.generate(requests, sampling, seed)
        samples = self._samples(batch, prompts, first) if self.scorer.calls_reward else []
        return Round(prompts, first, batch, self.scorer(samples, len(batch.sample_index)))

    def _groups_with_spread(self, collected: Round) -> list[bool]:
        """By the groups' numbers; the same on all ranks."""
        groups = collected.batch.group_index
        differs = group_mean(collected.scores.shaped, groups) != 0  # exactly 0 without spread
        found = torch.zeros(len(collected.prompts), dtype=torch.long, device=self.device)
        found[groups[differs] - collected.first] = 1
        dist.all_reduce(found, group=self.data_group)
        return [bool(has) for has in found.tolist()]

    def _token_advantages(
        self, batch: RolloutBatch, scores: Scores, turns_share: float
    ) -> Tensor | None:
        """`turns_share` of all ranks' responses had their turns rewarded."""
        if turns_share == 0:
            return None
        if turns_share < 1:
            raise RewardError(
                f"reward {name_of(self.scorer.reward)!r} returned rewards of turns for "
                f"{turns_share:.1%} of a step's responses; for all or for none is wanted"
            )
        advantages = build_turn_advantages(self.config.objective)
        return advantages(scores.turn_rewards, scores.turns, scores.turn_tokens, batch.group_index)

    def _samples(self, batch: RolloutBatch, prompts: Sequence[Prompt], first: int) -> list[Sample]:
        """The responses as a reward function sees them."""
        tokens = batch.tokens.tolist()
        samples, start = [], 0
        columns = (batch.prompt_lengths, batch.response_lengths, batch.group_index, batch.truncated)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        for prompt_length, length, group, truncated in rows:
            ids = tokens[start + prompt_length : start + prompt_length + length]
            start += prompt_length + length
            if ids and ids[-1] == self.tokenizer.eos_id:
                ids.pop()
            prompt, text = prompts[group - first], self.tokenizer.decode(ids)
            samples.append(
                Sample(prompt.text, prompt.answer, text, truncated, prompt.fields, length)
            )
        return samples

    def _add_figures(self, figures: StepMetrics, collected: Round) -> None:
        batch, scores = collected.batch, collected.scores
        means = {
            "reward/mean": _mean(scores.rewards),
            "reward/squared": _mean(scores.rewards**2),
            # of what is trained on: these groups have no gradient
            "reward/zero_spread_groups": zero_spread_groups(scores.shaped, batch.group_index),
            "response/length_mean": _mean(batch.response_lengths),
            "response/truncated": _mean(batch.truncated),
            "turns": _mean(scores.turns > 0),
        }
        if self.shaping.is_on:
            means["reward/shaped_mean"] = _mean(scores.shaped)
        figures.add_means(means)

    def _reduce(self, figures: StepMetrics) -> tuple[dict[str, float], float]:
        """Metrics, and the share of responses with rewards of turns; of all ranks and rounds."""
        metrics = figures.reduce(self.data_group)
        squared = metrics.pop("reward/squared")
        metrics["reward/std"] = math.sqrt(max(squared - metrics["reward/mean"] ** 2, 0.0))
        return metrics, metrics.pop("turns")


def _mean(values: Tensor) -> Tensor:
    """[sum, count] float64."""
    total = values.double().sum()
    return torch.stack([total, total.new_tensor(float(len(values)))])
