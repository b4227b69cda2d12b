"""Collects the scored responses of a step or an evaluation, and chooses groups to train on."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from gspo_megatron.config import Config
from gspo_megatron.data.selection import identity
from gspo_megatron.errors import EpisodeError, RewardError
from gspo_megatron.evaluation.scores import response_record
from gspo_megatron.objectives.advantages import has_spread
from gspo_megatron.observe.intervals import share_interval
from gspo_megatron.observe.metrics_files import sample_row
from gspo_megatron.platform.collectives import gather_objects, raised_everywhere
from gspo_megatron.platform.groups import data_parallel_group, model_replica
from gspo_megatron.platform.reduce_metrics import StepMetrics, mean_pair
from gspo_megatron.rewards.registry import Reward
from gspo_megatron.rewards.scoring import FailedCalls
from gspo_megatron.rl.reward_model import FolderScores, ModelRewards
from gspo_megatron.rollout.engine import RolloutRequest, RolloutShare, RolloutSource, Sampling
from gspo_megatron.rollout.episodes import GroupScorer
from gspo_megatron.rollout.types import RolloutGroup, to_tensor
from gspo_megatron.types import Prompt, RolloutBatch, Sample


@dataclass
class Experience:
    """This rank's share of the responses that a step trains on, with their scores."""

    group: RolloutGroup
    device: torch.device
    # The first `logging.samples_per_step` responses to the first request, as rows of samples.jsonl;
    # only on the first rank of each model replica.
    samples: list[dict[str, Any]] = field(default_factory=list)
    # The fields from here on are the same on all ranks.
    # the outcome of each prompt of all requests, in order: records of draws.jsonl without the step
    draws: list[dict[str, Any]] = field(default_factory=list)
    reward_seconds: float = 0.0  # wall seconds of scoring, on the slowest rank
    metrics: dict[str, float] = field(default_factory=dict)  # over all sampled responses
    num_tokens: int = 0  # number of sampled response tokens
    rollout_seconds: float = 0.0
    has_turns: bool = False  # whether turns have rewards

    @cached_property
    def batch(self) -> RolloutBatch:
        """The responses, on the device."""
        return self.group.to_batch(self.device)

    @property
    def shaped(self) -> Tensor:
        """The rewards to train on, [num_sequences] float64, on the device."""
        return to_tensor(self.group.shaped, self.device)

    @property
    def turns(self) -> list[Tensor] | None:
        """The arguments of `AdvantageEstimator.of_turns`, on the device; None: turns have no
        rewards."""
        group = self.group
        columns = (group.turn_rewards, group.turns, group.turn_tokens, group.group_index)
        return [to_tensor(each, self.device) for each in columns] if self.has_turns else None

    def describe(self) -> dict[str, Any]:
        """Return all fields except the responses, as JSON values. Only the main rank saves them."""
        names = [each.name for each in dataclasses.fields(self)]
        return {n: getattr(self, n) for n in names if n not in ("group", "device")}


class Collector:
    """Collects this rank's responses and scores from a rollout source.

    Every rank calls every method.
    """

    def __init__(
        self,
        config: Config,
        prompts: Mapping[str, Sequence[Prompt]],
        source: RolloutSource,
        scorer: GroupScorer,
        device: torch.device,
        score: FolderScores | None = None,
    ) -> None:
        """prompts: configuration key of prompt files -> their prompts; scorer: scores the run's
        responses; score: computes the scores of a reward model on these ranks."""
        self.config, self.prompts = config, prompts
        self.source, self.scorer, self.device = source, scorer, device
        self.model_rewards = ModelRewards(config, device, score)
        self.data_group = data_parallel_group()
        replica, _ = model_replica()
        self.tells = dist.get_rank() == dist.get_process_group_ranks(replica)[0]

    def close(self) -> None:
        """Free the resources of scorer and source."""
        self.scorer.close()
        self.source.close()

    def sample(
        self,
        request: RolloutRequest,
        scorer: GroupScorer | None = None,
        *,
        router_noise: bool = True,
    ) -> RolloutShare:
        """Return scored responses to this rank's share of the prompts.

        scorer: None stands for the run's scorer. Raises the errors of `RolloutSource.take`.
        """
        scorer, prompts = scorer or self.scorer, self.prompts_of(request)
        share = self.source.take(request, prompts, scorer, router_noise=router_noise)
        if scorer.has_model:
            texts = scorer.samples(share.group, prompts)
            self.model_rewards.add_to(share, scorer, texts, learns=request.is_learnt)
        return share

    def prompts_of(self, request: RolloutRequest) -> dict[int, Prompt]:
        """Return this rank's share of the request's prompts, by their numbers in the step."""
        size, rank = self.data_group.size(), self.data_group.rank()
        numbered = enumerate(request.rows, request.first)
        return {n: self.prompts[request.key][row] for n, row in numbered if n % size == rank}

    def judge(
        self, request: RolloutRequest, group: RolloutGroup
    ) -> tuple[list[dict[str, Any]], list[bool]]:
        """Return what came of each prompt of a request: its record of draws.jsonl without the step,
        and whether it lacks a reward.

        In the records, a response is solved if its unshaped reward is at least
        `data.selection.correct_at`, and `spread` says whether the group has different rewards (of
        turns, if turns have rewards). Both lists have the order of the prompts, and are the same on
        all ranks.
        """
        failed, rewards, turns = np.isnan(group.shaped), group.shaped, np.ones_like(group.turns)
        if group.turns.any():  # then only the turns' rewards have advantages
            rewards, turns = group.turn_rewards, group.turns
        groups = group.group_index.repeat(turns)
        spread = has_spread(torch.tensor(np.nan_to_num(rewards)), torch.tensor(groups)).numpy()
        spread = spread & ~failed.repeat(turns)

        correct_at, prompts = self.config.data.selection.correct_at, self.prompts[request.key]
        correct_at = self.config.evaluation.correct_at if correct_at is None else correct_at
        scored = ~np.isnan(group.rewards)
        values = (scored, scored & (group.rewards >= correct_at), np.nan_to_num(group.rewards))
        values = np.stack([failed, *values, group.response_lengths], 1)
        own_sums = np.zeros((len(request.rows), 6))  # [prompts, figures]: see below
        np.add.at(own_sums[:, 0], groups - request.first, spread)
        np.add.at(own_sums[:, 1:], group.group_index - request.first, values)
        totals = torch.tensor(own_sums, device=self.device)
        dist.all_reduce(totals, group=self.data_group)

        records, has_failed = [], []
        for row, figures in zip(request.rows, totals.tolist(), strict=True):
            spreads, failures, responses, solved, reward, length = figures
            has_failed.append(failures > 0)
            records.append(
                {
                    "prompt": identity(prompts[row]),
                    "row_id": prompts[row].row_id,
                    "responses": round(responses),
                    "solved": round(solved),
                    "reward": reward / responses if responses else None,
                    "length": length / request.per_prompt,
                    "spread": spreads > 0,
                }
            )
        return records, has_failed

    def sample_rows(self, request: RolloutRequest, group: RolloutGroup) -> list[dict[str, Any]]:
        """Return the first `logging.samples_per_step` responses as rows of samples.jsonl.

        One rank of each model replica gets them, and the other ranks get an empty list.
        """
        if not self.tells:
            return []
        prompts = self.prompts_of(request)
        count = self.config.logging.samples_per_step
        first = group.select(np.arange(len(group.sample_index)) < count)
        rows = []
        for row, sample in enumerate(self.scorer.samples(first, prompts)):
            reward, parts = float(first.rewards[row]), None
            if first.part_names:
                parts = {} if math.isnan(reward) else first.part_of(row)
            record = first.records[row] if first.records else None
            rows.append(sample_row(sample, reward, parts, record))
        return rows

    def evaluate(self, version: int = 0) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Generate one greedy response to each held-out prompt, and return the metrics.

        The metrics are the mean unshaped reward, and accuracy (the share of rewards of at least
        `evaluation.correct_at`) with its 95% interval. The main rank also gets the records of
        evaluation.jsonl in the order of the prompts. Without prompts both results are empty.
        version: the number of steps that the policy has been trained for.

        Raises, on all ranks, the errors of `sample`, and EpisodeError or RewardError if no response
        has a reward.
        """
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
        records = self.records(request, share.group, correct_at)
        return reduced, [record for _, record in records]

    def records(
        self,
        request: RolloutRequest,
        group: RolloutGroup,
        correct_at: float,
        answer_in: Callable[[Sample], Any] | None = None,
    ) -> list[tuple[int, dict[str, Any]]]:
        """Return (prompt number, record of evaluation.jsonl) for all ranks' responses, on the main
        rank.

        The records have the order of the prompts; other ranks get an empty list. answer_in: returns
        the answer that the reward reads in a response. Raises RewardError on all ranks if that
        fails.
        """
        own = []
        samples = self.scorer.samples(group, self.prompts_of(request)) if self.tells else []
        with raised_everywhere(RewardError):
            for row, sample in enumerate(samples):
                reason = group.reasons[row] if group.reasons else ""
                reward, parts = float(group.rewards[row]), group.part_of(row)
                record = response_record(sample, reward, parts, reason, correct_at)
                record |= group.records[row] if group.records else {}
                if answer_in is not None:
                    record["read_answer"] = answer_in(sample)
                own.append((int(group.group_index[row]), record))
        gathered = chain.from_iterable(gather_objects(own) or [])
        return sorted(gathered, key=lambda pair: pair[0])

    def nothing_scored(
        self, of_what: str, failed: Sequence[FailedCalls], reward: Reward | None = None
    ) -> EpisodeError | RewardError:
        """Make the error for a step or evaluation in which no response has a reward."""
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


@dataclass
class DynamicSampling:
    """Chooses, among the groups sampled so far, the groups that a step trains on.

    If the rewards of a group are all equal (no spread), all its advantages are 0, so more prompts
    replace the group. A teacher or a KL penalty does not change this choice. All ranks know which
    groups have a spread, so the choice is the same on every layout."""

    wanted: int  # number of groups for the step
    max_refills: int  # largest number of additional requests
    enabled: bool = True  # False: use the groups of one request, whatever their rewards
    requests: int = 0
    has_spread: list[bool] = field(default_factory=list)  # by the groups' numbers in the step
    has_failed: list[bool] = field(default_factory=list)  # groups without a reward are never used

    def add(self, has_spread: Sequence[bool], has_failed: Sequence[bool] | None = None) -> None:
        """Add the groups of one more request, in order. A failed group has no spread."""
        self.requests += 1
        self.has_spread += has_spread
        self.has_failed += has_failed or [False] * len(has_spread)

    @property
    def wants_more(self) -> bool:
        """Whether another request is needed."""
        if self.requests == 0 or not self.enabled:
            return self.requests == 0
        return sum(self.has_spread) < self.wanted and self.requests <= self.max_refills

    @property
    def zero_spread_share(self) -> float:
        """The share of groups without spread among the groups with rewards, of which there is at
        least one."""
        scored = [s for s, failed in zip(self.has_spread, self.has_failed) if not failed]
        return scored.count(False) / len(scored)

    @property
    def num_groups(self) -> int:
        """The number of groups so far; also the number of the next request's first group."""
        return len(self.has_spread)

    def candidates(self, first: int) -> list[int]:
        """Return the groups from number `first` on that may still be chosen.

        Other groups need not be kept.
        """
        first_scored = self._first_scored()
        return [n for n in range(first, self.num_groups) if self.has_spread[n] or n in first_scored]

    def groups(self) -> list[int]:
        """Return the numbers of the chosen groups: the first `wanted` groups with a spread.

        There may be fewer. If no group has a spread, returns the first `wanted` groups that have
        not failed, because a step needs some sequences.
        """
        chosen = [number for number, has in enumerate(self.has_spread) if has]
        if self.enabled and chosen:
            return chosen[: self.wanted]
        return self._first_scored()

    def _first_scored(self) -> list[int]:
        scored = [number for number, failed in enumerate(self.has_failed) if not failed]
        return scored[: self.wanted]

    def metrics(self) -> dict[str, float]:
        """Return the metrics. `rollout/no_spread` is 1 if no group had a spread: the step learns
        nothing from rewards."""
        if not self.enabled:
            return {}
        return {
            "rollout/refills": float(self.requests - 1),
            "rollout/groups_dropped": float(self.num_groups - len(self.groups())),
            "rollout/no_spread": float(not any(self.has_spread)),
        }
