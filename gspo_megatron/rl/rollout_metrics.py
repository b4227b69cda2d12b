"""Metrics of the responses of a step."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from gspo_megatron.batching.redistribute import branch_starts
from gspo_megatron.errors import EpisodeError, RewardError
from gspo_megatron.platform.collectives import all_gather_columns
from gspo_megatron.platform.reduce_metrics import StepMetrics, mean_pair
from gspo_megatron.rewards.scoring import FailedCalls
from gspo_megatron.rl.rollouts import Collector
from gspo_megatron.rollout.engine import ModelWork, RolloutShare
from gspo_megatron.rollout.types import RolloutGroup, to_tensor
from gspo_megatron.types import RolloutBatch


class RolloutMetrics:
    """Metrics of a step's responses, over all ranks and over all requests of the step."""

    def __init__(self, collector: Collector) -> None:
        self.collector, self._metrics = collector, StepMetrics(collector.device)
        self._lengths: list[np.ndarray] = []  # response lengths [num_sequences] of each request
        self.failed: list[FailedCalls] = []  # the failed calls of each request
        self.reward_seconds = 0.0
        self.has_turns = False  # whether turns have rewards; known after `reduce`
        self.teacher_seconds: float | None = None  # on this rank; None: no teacher behind a URL
        self.model_seconds = 0.0  # wall seconds of a reward model on this rank or its server
        self.model_running: tuple[float, float] | None = None  # see ModelWork

    def add(self, share: RolloutShare) -> None:
        """Add the responses of one more request of the step."""
        group, device = share.group, self.collector.device
        rewards, shaped, turns, lengths, truncated = (
            to_tensor(column, device)
            for column in (
                group.rewards,
                group.shaped,
                group.turns,
                group.response_lengths,
                group.truncated,
            )
        )
        scored = ~rewards.isnan()
        rewards = rewards[scored]
        means = {
            "reward/mean": mean_pair(rewards),
            "reward/squared": mean_pair(rewards**2),
            "response/length_mean": mean_pair(lengths),
            "response/truncated": mean_pair(truncated),
            "turns": mean_pair(turns[scored] > 0),
        }
        if self.collector.scorer.shapes:
            means["reward/shaped_mean"] = mean_pair(shaped[~shaped.isnan()])
        for number, name in enumerate(group.part_names or ()):
            assert group.parts is not None, "its names are there"
            part = to_tensor(group.parts[:, number].copy(), device)
            means[f"reward/{name}"] = mean_pair(part[scored])
        for number, name in enumerate(self.collector.scorer.reward.figures):
            known = group.figures[:, number] if group.figures is not None else np.zeros(0)
            figure = to_tensor(known[~np.isnan(known)], device)
            means[f"reward/{name}"] = mean_pair(figure)
        if share.staleness is not None:
            ages = to_tensor(share.staleness, device)
            means["staleness/mean"] = mean_pair(ages)
            means["staleness/tokens_older_than_1"] = mean_pair(ages > 1)
            self._metrics.add_maximum("staleness/max", ages.max() if len(ages) else ages.sum())
            bound = self.collector.config.objective.max_token_staleness
            if bound is not None:
                means["staleness/masked"] = mean_pair(ages > bound)
        if group.teacher_seconds is not None:
            waited = float(group.teacher_seconds.sum())
            self.teacher_seconds = waited + (self.teacher_seconds or 0.0)
        if group.sampled is not None:
            means |= self._episode_means(group, to_tensor(group.sampled, device))
        if share.model is not None:
            means |= self._model_means(share.model)
        self._metrics.add_means(means)
        self._lengths.append(group.response_lengths)
        self.failed.append(share.failed_calls)
        self.reward_seconds += share.reward_seconds

    def _episode_means(self, group: RolloutGroup, sampled: Tensor) -> dict[str, Tensor]:
        """Return the means of the episodes that did not fail. `sampled` marks no token of a failed
        episode, so its turns cannot be counted."""
        # routes are large and not needed for metrics
        batch = dataclasses.replace(group, routes=None).to_batch(self.collector.device)
        played, branches = turns_and_branches(batch, sampled)
        whole = played > 0
        written = sampled[whole.repeat_interleave(batch.response_lengths)]
        return {
            "environment/turns": mean_pair(played[whole]),
            "environment/branches": mean_pair(branches[whole]),
            "environment/sampled_share": mean_pair(written),
        }

    def _model_means(self, model: ModelWork) -> dict[str, Tensor]:
        """Return the means of a reward model's results, and keep its time and running moments."""
        device, answers = self.collector.device, model.answers
        self.model_seconds += answers.seconds
        if model.running is not None:
            self.model_running = model.running
        scores = to_tensor(answers.scores[~np.isnan(answers.scores)], device)
        return {
            "reward_model/mean": mean_pair(scores),
            "reward_model/squared": mean_pair(scores**2),
            "reward_model/tokens": mean_pair(to_tensor(answers.tokens, device)),
            "reward_model/cut": mean_pair(to_tensor(answers.cut, device)),
            "response/repeated": mean_pair(to_tensor(model.repeated, device)),
        }

    def reduce(self) -> dict[str, float]:
        """Return the metrics, which are the same on all ranks.

        Raises RewardError or EpisodeError on all ranks if only some responses have rewards of
        turns.
        """
        collector, has_episodes = self.collector, self.collector.config.environment.has_episodes
        waited = {"distill/teacher_seconds": self.teacher_seconds}
        if collector.scorer.has_model:
            waited["perf/reward_model_seconds"] = self.model_seconds
        for name, seconds in waited.items():
            if seconds is not None:
                value = torch.tensor(seconds, dtype=torch.float64, device=collector.device)
                self._metrics.add_maximum(name, value)
        reduced = self._metrics.reduce(collector.data_group)
        if collector.scorer.has_model:
            reduced |= self._model_figures(reduced)
        squared, turns_share = reduced.pop("reward/squared"), reduced.pop("turns")
        reduced["reward/std"] = math.sqrt(max(squared - reduced["reward/mean"] ** 2, 0.0))
        if 0 < turns_share < 1:
            of_all = f"for {turns_share:.1%} of a step's responses; allowed: all or none of them"
            if has_episodes:  # the rewards came from the environment or the reward
                raise EpisodeError(f"the environment or the reward gave rewards of turns {of_all}")
            name = collector.scorer.reward.name
            raise RewardError(f"reward {name!r} returned rewards of turns {of_all}")
        self.has_turns = turns_share == 1
        reduced |= self._length_percentiles()
        reduced["reward/errors"] = float(sum(each.errors for each in self.failed))
        reduced["reward/timeouts"] = float(sum(each.timeouts for each in self.failed))
        if has_episodes:
            reduced["environment/errors"] = float(sum(each.episodes for each in self.failed))
        return reduced

    def _model_figures(self, reduced: dict[str, float]) -> dict[str, float]:
        """Return the metrics of a reward model that are computed from its means."""
        squared, mean = reduced.pop("reward_model/squared"), reduced["reward_model/mean"]
        counts = torch.tensor(float(sum(map(len, self._lengths))), device=self.collector.device)
        dist.all_reduce(counts, group=self.collector.data_group)
        per_second = float(counts) / max(reduced["perf/reward_model_seconds"], 1e-9)
        figures = {
            "reward_model/std": math.sqrt(max(squared - mean**2, 0.0)),
            "perf/reward_model_scores_per_second": per_second,
            "perf/reward_model_tokens_per_second": per_second * reduced["reward_model/tokens"],
        }
        if self.model_running is not None:
            figures["reward_model/running_mean"], figures["reward_model/running_std"] = (
                self.model_running
            )
        return figures

    def _length_percentiles(self) -> dict[str, float]:
        mine = to_tensor(np.concatenate(self._lengths), self.collector.device)
        lengths = torch.cat(all_gather_columns(mine, self.collector.data_group))
        levels = {"p50": 50, "p90": 90, "p99": 99, "max": 100}
        values = np.percentile(lengths.double().cpu().numpy(), list(levels.values())).tolist()
        return {f"response/length_{name}": v for name, v in zip(levels, values, strict=True)}


def turns_and_branches(batch: RolloutBatch, sampled: Tensor) -> Tensor:
    """Count turns and branches, [2, num_sequences] int64.

    sampled: [sum(response_lengths)] bool, True on tokens that the policy wrote.
    """
    starts, is_response = branch_starts(batch), batch.in_response
    assert is_response is not None
    # a turn starts where the policy wrote a token but not the token before it
    written = torch.zeros_like(starts).masked_scatter(is_response, sampled)
    turns = written & ~written.roll(1)
    lengths = batch.prompt_lengths + batch.response_lengths
    sequences = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)
    counts = torch.zeros((2, len(lengths)), dtype=torch.long, device=lengths.device)
    return counts.index_add_(1, sequences, torch.stack([turns, starts]).long())
