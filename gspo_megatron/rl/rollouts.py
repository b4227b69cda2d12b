"""Responses and their scores: what a step learns from, and how it is collected and measured."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from gspo_megatron.batching.redistribute import branch_starts
from gspo_megatron.config import Config
from gspo_megatron.errors import EpisodeError, RewardError
from gspo_megatron.objectives.advantages import group_mean, zero_spread_groups
from gspo_megatron.observe.intervals import share_interval
from gspo_megatron.observe.metrics_files import written_answer
from gspo_megatron.platform.collectives import all_gather_columns, gather_objects
from gspo_megatron.platform.groups import data_parallel_group, model_replica
from gspo_megatron.platform.reduce_metrics import StepMetrics
from gspo_megatron.rewards.registry import Reward
from gspo_megatron.rewards.scoring import FailedCalls
from gspo_megatron.rollout.engine import RolloutRequest, Sampling
from gspo_megatron.rollout.episodes import GroupScorer
from gspo_megatron.rollout.source import RolloutShare, RolloutSource
from gspo_megatron.rollout.types import RolloutGroup, Scores, to_tensor
from gspo_megatron.types import Prompt, RolloutBatch, Sample


@dataclass
class Experience:
    """This rank's share of the responses that a step trains on, with their scores."""

    group: RolloutGroup
    device: torch.device
    # The first `logging.samples_per_step` responses to the first request, to be written to the
    # run folder, on the ranks that tell of responses:
    samples: list[Sample] = field(default_factory=list)
    sample_rewards: list[float] = field(default_factory=list)
    sample_parts: list[dict[str, float]] = field(default_factory=list)  # none without parts
    # of episodes, their turns: see `environments.transcript`
    sample_records: Sequence[dict[str, Any]] = field(default_factory=list)
    # The same on all ranks:
    reward_seconds: float = 0.0  # wall seconds of scoring, on the slowest rank
    metrics: dict[str, float] = field(default_factory=dict)  # over all responses sampled
    num_tokens: int = 0  # response tokens sampled
    rollout_seconds: float = 0.0
    has_turns: bool = False  # the reward function rewards turns

    @cached_property
    def batch(self) -> RolloutBatch:
        """The responses, on the device."""
        return self.group.to_batch(self.device)

    @cached_property
    def scores(self) -> Scores:
        """Their rewards, on the device."""
        return self.group.to_scores(self.device)

    def describe(self) -> dict[str, Any]:
        """All but the responses themselves, for JSON. That of the main rank is saved."""
        names = [each.name for each in dataclasses.fields(self)]
        kept = {n: getattr(self, n) for n in names if n not in ("group", "device")}
        unread = {"fields": {}, "messages": []}  # they are not written to samples.jsonl
        samples = [dataclasses.asdict(sample) | unread for sample in self.samples]
        return kept | {"samples": samples}


class Collector:
    """Responses and their scores, on this rank, wherever they come from; every rank calls
    everything."""

    def __init__(
        self,
        config: Config,
        prompts: Mapping[str, Sequence[Prompt]],
        source: RolloutSource,
        scorer: GroupScorer,
        device: torch.device,
    ) -> None:
        """prompts: by the key of the configuration that names their files; scorer: of the run."""
        self.config, self.prompts = config, prompts
        self.source, self.scorer, self.device = source, scorer, device
        self.data_group = data_parallel_group()
        replica, _ = model_replica()
        self.tells = dist.get_rank() == dist.get_process_group_ranks(replica)[0]

    @property
    def has_episodes(self) -> bool:
        """Whether the policy acts in an environment of several turns."""
        return self.config.environment.has_episodes

    def close(self) -> None:
        """The run ends."""
        self.scorer.close()
        self.source.close()

    def sample(
        self,
        request: RolloutRequest,
        scorer: GroupScorer | None = None,
        *,
        router_noise: bool = True,
    ) -> RolloutShare:
        """Responses with their scores, to this rank's share of the prompts; scorer: None for that
        of the run. Raises what `RolloutSource.take` raises."""
        scorer, prompts = scorer or self.scorer, self.prompts_of(request)
        return self.source.take(request, prompts, scorer, router_noise=router_noise)

    def prompts_of(self, request: RolloutRequest) -> list[Prompt]:
        """All prompts of a request."""
        return [self.prompts[request.key][row] for row in request.rows]

    def texts(
        self, request: RolloutRequest, group: RolloutGroup, count: int | None = None
    ) -> list[Sample]:
        """The first `count` responses as text, on one rank of each model replica; nothing on the
        others."""
        if not self.tells:
            return []
        rows = np.arange(len(group.sample_index))
        shown = group if count is None else group.select(rows < count)
        return self.scorer.samples(shown, self.prompts_of(request), request.first)

    def measure(self, share: RolloutShare, metrics: StepMetrics) -> None:
        """Add the metrics of one request."""
        group = dataclasses.replace(share.group, routes=None)  # they are large, and not counted
        batch, scores = group.to_batch(self.device), group.to_scores(self.device)
        scored, whole = ~scores.rewards.isnan(), ~scores.shaped.isnan()
        rewards, shaped = scores.rewards[scored], scores.shaped[whole]
        means = {
            "reward/mean": mean_pair(rewards),
            "reward/squared": mean_pair(rewards**2),
            # of the shaped rewards: groups without a spread of these have no gradient
            "reward/zero_spread_groups": zero_spread_groups(shaped, batch.group_index[whole]),
            "response/length_mean": mean_pair(batch.response_lengths),
            "response/truncated": mean_pair(batch.truncated),
            "turns": mean_pair(scores.turns[scored] > 0),
        }
        if self.scorer.shaping.is_on:
            means["reward/shaped_mean"] = mean_pair(shaped)
        for number, name in enumerate(group.part_names or ()):
            assert group.parts is not None, "its names are there"
            part = to_tensor(group.parts[:, number].copy(), self.device)
            means[f"reward/{name}"] = mean_pair(part[scored])
        if share.staleness is not None:
            ages = to_tensor(share.staleness, self.device)
            means["staleness/mean"] = mean_pair(ages)
            means["staleness/tokens_older_than_1"] = mean_pair(ages > 1)
            metrics.add_maximum("staleness/max", ages.max() if len(ages) else ages.sum())
            bound = self.config.objective.max_token_staleness
            if bound is not None:
                means["staleness/masked"] = mean_pair(ages > bound)
        if group.sampled is not None:
            sampled = to_tensor(group.sampled, self.device)
            turns, branches = turns_and_branches(batch, sampled)
            means["environment/turns"] = mean_pair(turns)
            means["environment/branches"] = mean_pair(branches)
            means["environment/sampled_share"] = mean_pair(sampled)
        metrics.add_means(means)

    def reduce(self, metrics: StepMetrics) -> tuple[dict[str, float], bool]:
        """The metrics over all ranks and requests, and whether the reward function rewards turns.
        Raises RewardError, on all ranks, where it does so for some of the responses only."""
        reduced = metrics.reduce(self.data_group)
        squared, turns_share = reduced.pop("reward/squared"), reduced.pop("turns")
        reduced["reward/std"] = math.sqrt(max(squared - reduced["reward/mean"] ** 2, 0.0))
        if 0 < turns_share < 1:
            of_all = f"for {turns_share:.1%} of a step's responses; legal: for all of them, or none"
            if self.has_episodes:  # who has given them is not known any more
                raise EpisodeError(f"the environment or the reward gave rewards of turns {of_all}")
            name = self.scorer.reward.name
            raise RewardError(f"reward {name!r} returned rewards of turns {of_all}")
        return reduced, turns_share == 1

    def lengths(self, of_requests: Sequence[np.ndarray]) -> dict[str, float]:
        """Percentiles of the response lengths [num_sequences] of all requests and ranks."""
        mine = to_tensor(np.concatenate(of_requests), self.device)
        lengths = torch.cat(all_gather_columns(mine, self.data_group))
        levels = {"p50": 50, "p90": 90, "p99": 99, "max": 100}
        values = np.percentile(lengths.double().cpu().numpy(), list(levels.values())).tolist()
        return {f"response/length_{name}": v for name, v in zip(levels, values, strict=True)}

    def judge_groups(
        self, group: RolloutGroup, request: RolloutRequest
    ) -> tuple[list[bool], list[bool]]:
        """Which groups of one request have different rewards, and in which a call of the reward
        function failed, by number; the same on all ranks."""
        groups, shaped = (
            to_tensor(values, self.device) for values in (group.group_index, group.shaped)
        )
        failed = shaped.isnan()
        differs = (group_mean(shaped.nan_to_num(), groups) != 0) & ~failed  # 0 without spread
        found = torch.zeros((2, len(request.rows)), dtype=torch.long, device=self.device)
        found[0, groups[differs] - request.first] = 1
        found[1, groups[failed] - request.first] = 1
        dist.all_reduce(found, group=self.data_group)
        has_spread, has_failed = (found > 0).tolist()
        return has_spread, has_failed

    def evaluate(self, version: int = 0) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """One greedy response to each held-out prompt. Returns the mean reward as the reward
        function gives it, and accuracy, the share with at least `evaluation.correct_at`, with its
        95% interval; and on the main rank the responses for evaluation.jsonl, in the prompts'
        order. Nothing without prompts. `version`: steps that the policy has made.

        Raises EpisodeError or RewardError, on all ranks, as `sample`, and where no response has a
        reward."""
        rollout, training, key = self.config.rollout, self.config.training, "data.eval_prompts"
        rows = [*range(len(self.prompts.get(key, ())))][: training.evaluation_prompts]
        if not rows:
            return {}, []
        greedy = Sampling(rollout.max_response_tokens, temperature=0.0, stop=tuple(rollout.stop))
        request = RolloutRequest(
            f"evaluation_{version:08d}", key, rows, 0, 1, greedy, training.seed, version
        )
        share = self.sample(request)
        correct_at = self.config.evaluation.correct_at
        rewards = to_tensor(share.group.rewards, self.device)
        failed = rewards.isnan()
        metrics = StepMetrics(self.device)
        metrics.add_means(
            {
                "evaluation/reward": mean_pair(rewards[~failed]),
                "evaluation/accuracy": mean_pair(rewards[~failed] >= correct_at),
                "evaluation/failed": mean_pair(failed),
            }
        )
        reduced = metrics.reduce(self.data_group)
        failed_share = reduced.pop("evaluation/failed")
        if failed_share == 1:
            raise self.nothing_scored("of an evaluation", [share.failed_calls])
        if self.config.reward.on_failure == "drop_group":
            reduced["evaluation/failed"] = round(failed_share * len(rows))
        count = len(rows) - round(failed_share * len(rows))
        low, high = share_interval(reduced["evaluation/accuracy"], count)
        reduced |= {"evaluation/accuracy_low": low, "evaluation/accuracy_high": high}
        reduced["evaluation/prompts"] = count
        samples = self.texts(request, share.group)
        told = gather_objects(responses(share.group, samples, correct_at)) or []
        numbered = sorted((pair for of_rank in told for pair in of_rank), key=lambda pair: pair[0])
        return reduced, [response for _, response in numbered]

    def nothing_scored(
        self, of_what: str, failed: Sequence[FailedCalls], reward: Reward | None = None
    ) -> EpisodeError | RewardError:
        """For a step or evaluation in which no response has a reward."""
        if any(each.episodes for each in failed) and not any(sum(each[:2]) for each in failed):
            return EpisodeError(
                f"the environment: its episodes failed in all groups {of_what}, so nothing is "
                "left; the reasons are above; `gspo-megatron play CONFIG.yaml` shows episodes"
            )
        name = (reward or self.scorer.reward).name
        return RewardError(
            f"reward {name!r}: its calls failed in all groups {of_what}, so nothing is left; the "
            "reasons are above; `gspo-megatron score CONFIG.yaml` calls it once"
        )


def shown(group: RolloutGroup, samples: Sequence[Sample]) -> dict[str, Any]:
    """What an Experience keeps of its first responses. samples: them as text."""
    rows = range(len(samples))
    has_failed = np.isnan(group.rewards).tolist()
    return {
        "samples": list(samples),
        "sample_rewards": group.rewards[: len(samples)].tolist(),
        "sample_parts": [{} if has_failed[row] else group.part_of(row) for row in rows]
        if group.part_names
        else [],
        "sample_records": (group.records or [])[: len(samples)],
    }


def responses(
    group: RolloutGroup, samples: Sequence[Sample], correct_at: float
) -> list[tuple[int, dict[str, Any]]]:
    """The records of evaluation.jsonl of a rank's responses, with the numbers of their prompts.
    samples: the responses as text; nothing on ranks that do not tell of them."""
    found = []
    for row, sample in enumerate(samples):
        reward, parts = float(group.rewards[row]), group.part_of(row)
        scored = not math.isnan(reward)
        reason = group.reasons[row] if group.reasons else ""
        record = {
            "row_id": sample.row_id,
            "prompt": sample.prompt,
            "answer": written_answer(sample),
            "response": sample.response,
            **({"transcript": sample.transcript} if sample.transcript else {}),
            "reward": reward if scored else None,
            **({"parts": parts} if parts and scored else {}),
            **({"reason": reason} if reason else {}),
            "correct": reward >= correct_at if scored else None,
            "truncated": sample.truncated,
            "num_tokens": sample.num_tokens,
            **(group.records[row] if group.records else {}),
        }
        found.append((int(group.group_index[row]), record))
    return found


def turns_and_branches(batch: RolloutBatch, sampled: Tensor) -> Tensor:
    """[2, num_sequences] int64. sampled: [sum(response_lengths)] bool, what the policy wrote."""
    starts, is_response = branch_starts(batch), batch.in_response
    assert is_response is not None
    # whether the policy wrote a token and not the one before it, of all tokens
    written = torch.zeros_like(starts).masked_scatter(is_response, sampled)
    turns = written & ~written.roll(1)
    lengths = batch.prompt_lengths + batch.response_lengths
    sequences = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)
    counts = torch.zeros((2, len(lengths)), dtype=torch.long, device=lengths.device)
    return counts.index_add_(1, sequences, torch.stack([turns, starts]).long())


def mean_pair(values: Tensor) -> Tensor:
    """[sum, count] float64."""
    total = values.double().sum()
    return torch.stack([total, total.new_tensor(float(len(values)))])
