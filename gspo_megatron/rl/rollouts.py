"""Responses and their scores: what a step learns from, and how it is sampled and scored."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from gspo_megatron.config import Config
from gspo_megatron.environments.single_turn import SingleTurn
from gspo_megatron.errors import RewardError
from gspo_megatron.objectives.advantages import group_mean, zero_spread_groups
from gspo_megatron.observe.heartbeat import heartbeat
from gspo_megatron.platform.groups import data_parallel_group, model_replica
from gspo_megatron.platform.reduce_metrics import StepMetrics
from gspo_megatron.rewards.registry import Reward, name_of, score
from gspo_megatron.rewards.shaping import Shaping
from gspo_megatron.rollout.engine import Requests, RolloutEngine, Sampling
from gspo_megatron.types import Prompt, RolloutBatch, Sample, TurnRewards


@dataclass
class Scores:
    """The rewards of this rank's responses, in their order.

    `turn_rewards` and `turn_tokens` hold the turns of all responses, response after response.
    `turns` is 0 for a response whose turns were not rewarded.
    """

    rewards: Tensor  # [num_sequences] float64, as the reward function returned them, turns summed
    shaped: Tensor  # [num_sequences] float64, what is trained on
    turns: Tensor  # [num_sequences] int64
    turn_rewards: Tensor  # [turns] float64, shaped
    turn_tokens: Tensor  # [turns] int64, response tokens of each

    def select(self, rows: Tensor) -> Scores:
        """Those of the responses that `rows` [num_sequences] bool marks."""
        turns = rows.repeat_interleave(self.turns)
        chosen = {"turn_rewards": turns, "turn_tokens": turns}
        return Scores(**{n: column[chosen.get(n, rows)] for n, column in vars(self).items()})


@dataclass
class Experience:
    """This rank's share of the responses that a step trains on, with their scores."""

    batch: RolloutBatch
    scores: Scores
    # The responses as text, on the ranks that call the reward function. Of a whole step: the first
    # `logging.samples_per_step` of the first draw, to be written to the run folder.
    samples: list[Sample] = field(default_factory=list)
    sample_rewards: list[float] = field(default_factory=list)
    # Of a whole step, the same on all ranks:
    metrics: dict[str, float] = field(default_factory=dict)  # over all responses sampled
    num_tokens: int = 0  # response tokens sampled
    rollout_seconds: float = 0.0
    has_turns: bool = False  # the reward function rewards turns

    def describe(self) -> dict[str, Any]:
        """All but the tensors, for JSON. That of the main rank is saved."""
        kept = {k: v for k, v in vars(self).items() if k not in ("batch", "scores")}
        samples = [dataclasses.asdict(sample) | {"fields": {}} for sample in self.samples]
        return kept | {"samples": samples}

    def of_groups(self, numbers: Sequence[int]) -> Experience:
        """The responses to these of the step's prompts."""
        groups = self.batch.group_index
        rows = torch.isin(groups, torch.tensor(numbers, dtype=torch.long, device=groups.device))
        return Experience(select_sequences(self.batch, rows), self.scores.select(rows))

    @classmethod
    def join(cls, parts: Sequence[Experience]) -> Experience:
        """The responses of several draws end to end."""
        return cls(join([p.batch for p in parts]), join([p.scores for p in parts]))


def select_sequences(batch: RolloutBatch, rows: Tensor) -> RolloutBatch:
    """The sequences that `rows` [num_sequences] bool marks."""
    responses = rows.repeat_interleave(batch.response_lengths)
    tokens = rows.repeat_interleave(batch.prompt_lengths + batch.response_lengths)
    of_tokens = {"tokens": tokens, "rollout_logprobs": responses, "routes": tokens}
    return RolloutBatch(
        **{
            name: None if value is None else value[of_tokens.get(name, rows)]
            for name, value in vars(batch).items()
        }
    )


def join(parts: Sequence[RolloutBatch] | Sequence[Scores]) -> RolloutBatch | Scores:
    """Records of flat tensors end to end."""
    columns = {name: [getattr(part, name) for part in parts] for name in vars(parts[0])}
    joined = {n: None if values[0] is None else torch.cat(values) for n, values in columns.items()}
    return type(parts[0])(**joined)


class Collector:
    """Rolls out and scores prompts on this rank; every rank calls everything."""

    def __init__(
        self,
        config: Config,
        engine: RolloutEngine,
        environment: SingleTurn,
        reward: Reward,
        device: torch.device,
    ) -> None:
        self.config, self.engine, self.environment = config, engine, environment
        self.device = device
        self.data_group = data_parallel_group()
        self.shaping = Shaping(config.reward, config.rollout.max_response_tokens)
        self.reward = reward
        self.replica, _ = model_replica()
        self.reward_rank = dist.get_process_group_ranks(self.replica)[0]

    def roll_out(
        self, prompts: Sequence[Prompt], first: int, per_prompt: int, sampling: Sampling, seed: int
    ) -> RolloutBatch:
        """Responses to this rank's share of the prompts: every `data_size`-th of them, so that each
        data rank holds whole groups.

        `first` is the number of the first prompt in the step. The numbers of the samples follow
        from it, and all random numbers follow from these and the seed.
        """
        rank, size = self.data_group.rank(), self.data_group.size()
        numbers = [n for n in range(first, first + len(prompts)) if n % size == rank]
        requests = Requests([prompts[n - first].token_ids for n in numbers], numbers, per_prompt)
        return self.engine.generate(requests, sampling, seed)

    def score(self, batch: RolloutBatch, prompts: Sequence[Prompt], first: int) -> Experience:
        """The responses with what the reward function gives for them. It may be slow or not
        deterministic: one rank of each model replica calls it and sends the scores to the others.
        """
        samples: list[Sample] = []
        scores = torch.zeros((3, len(batch.sample_index)), dtype=torch.float64, device=self.device)
        turns = torch.zeros((2, 0), dtype=torch.float64, device=self.device)
        calls_reward = dist.get_rank() == self.reward_rank
        if calls_reward:
            columns = (batch.prompt_lengths, batch.response_lengths, batch.truncated)
            samples = self.environment.samples(
                batch.tokens.cpu(),
                *(column.cpu() for column in (*columns, batch.group_index)),
                prompts,
                first,
            )
            scores, turns = (
                torch.as_tensor(values, device=self.device) for values in self._rewards(samples)
            )
        if self.replica.size() > 1:
            dist.broadcast(scores, src=self.reward_rank, group=self.replica)
            number = int(scores[2].sum())
            if number:
                if not calls_reward:
                    turns = turns.new_empty((2, number))
                dist.broadcast(turns, src=self.reward_rank, group=self.replica)
        rewards, shaped, counts = scores
        found = Scores(rewards, shaped, counts.long(), turns[0], turns[1].long())
        return Experience(batch, found, samples, rewards.tolist())

    def _rewards(self, samples: Sequence[Sample]) -> tuple[np.ndarray, np.ndarray]:
        """[3, num_sequences]: reward, shaped reward, number of turns; [2, turns]: shaped reward and
        tokens of each turn. Counts are exact in float64."""
        columns = np.zeros((3, len(samples)))
        turns = [np.zeros((2, 0))]
        for row, sample in enumerate(samples):
            found = score(self.reward, sample)
            heartbeat()  # a reward may take long, and all ranks wait for the last
            of_turns = isinstance(found, TurnRewards)
            rewards = np.asarray(found.rewards) if of_turns else np.array([found])
            shaped = self.shaping(rewards, sample)
            columns[:, row] = rewards.sum(), shaped.sum(), len(rewards) if of_turns else 0
            if of_turns:
                turns.append(np.stack([shaped, np.diff(found.ends, prepend=0)]))
        return columns, np.concatenate(turns, axis=1)

    def measure(self, experience: Experience, metrics: StepMetrics) -> None:
        """Add the metrics of one draw."""
        batch, scores = experience.batch, experience.scores
        means = {
            "reward/mean": mean_pair(scores.rewards),
            "reward/squared": mean_pair(scores.rewards**2),
            # of the shaped rewards: groups without a spread of these have no gradient
            "reward/zero_spread_groups": zero_spread_groups(scores.shaped, batch.group_index),
            "response/length_mean": mean_pair(batch.response_lengths),
            "response/truncated": mean_pair(batch.truncated),
            "turns": mean_pair(scores.turns > 0),
        }
        if self.shaping.is_on:
            means["reward/shaped_mean"] = mean_pair(scores.shaped)
        metrics.add_means(means)

    def reduce(self, metrics: StepMetrics) -> tuple[dict[str, float], bool]:
        """The metrics over all ranks and draws, and whether the reward function rewards turns.
        Raises RewardError, on all ranks, where it does so for some of the responses only."""
        reduced = metrics.reduce(self.data_group)
        squared, turns_share = reduced.pop("reward/squared"), reduced.pop("turns")
        reduced["reward/std"] = math.sqrt(max(squared - reduced["reward/mean"] ** 2, 0.0))
        if 0 < turns_share < 1:
            raise RewardError(
                f"reward {name_of(self.reward)!r} returned rewards of turns for "
                f"{turns_share:.1%} of a step's responses; legal: for all of them, or for none"
            )
        return reduced, turns_share == 1

    def groups_with_spread(
        self, experience: Experience, first: int, num_prompts: int
    ) -> list[bool]:
        """Which groups of one draw have different rewards, by number; the same on all ranks."""
        groups = experience.batch.group_index
        differs = group_mean(experience.scores.shaped, groups) != 0  # exactly 0 without spread
        found = torch.zeros(num_prompts, dtype=torch.long, device=self.device)
        found[groups[differs] - first] = 1
        dist.all_reduce(found, group=self.data_group)
        return [bool(has) for has in found.tolist()]

    def evaluate(self, prompts: Sequence[Prompt]) -> dict[str, float]:
        """One greedy response to each held-out prompt: the mean reward as the reward function gives
        it, and accuracy, the share with full reward (1). Nothing without prompts."""
        rollout, training = self.config.rollout, self.config.training
        prompts = prompts[: training.evaluation_prompts]
        if not prompts:
            return {}
        greedy = Sampling(rollout.max_response_tokens, temperature=0.0, stop=tuple(rollout.stop))
        batch = self.roll_out(prompts, 0, 1, greedy, training.seed)
        rewards = self.score(batch, prompts, 0).scores.rewards
        metrics = StepMetrics(self.device)
        metrics.add_means(
            {
                "evaluation/reward": mean_pair(rewards),
                "evaluation/accuracy": mean_pair(rewards >= 1.0),
            }
        )
        return metrics.reduce(self.data_group)


def mean_pair(values: Tensor) -> Tensor:
    """[sum, count] float64."""
    total = values.double().sum()
    return torch.stack([total, total.new_tensor(float(len(values)))])
