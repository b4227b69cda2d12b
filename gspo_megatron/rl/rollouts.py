"""Responses and their scores: what a step learns from, and how it is sampled and scored."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from gspo_megatron.batching.redistribute import branch_starts
from gspo_megatron.config import Config
from gspo_megatron.environments.single_turn import SingleTurn
from gspo_megatron.environments.transcript import records_of
from gspo_megatron.errors import EpisodeError, RewardError, UserError, error_of
from gspo_megatron.objectives.advantages import group_mean, zero_spread_groups
from gspo_megatron.observe.intervals import share_interval
from gspo_megatron.observe.metrics_files import written_answer
from gspo_megatron.platform.collectives import (
    all_gather_columns,
    all_gather_numbers,
    all_gather_objects,
    gather_objects,
)
from gspo_megatron.platform.groups import data_parallel_group, model_replica
from gspo_megatron.platform.reduce_metrics import StepMetrics
from gspo_megatron.process.heartbeat import heard_by
from gspo_megatron.rewards.registry import Reward
from gspo_megatron.rewards.scoring import (
    FailedCalls,
    PartNames,
    Scorer,
    describe,
    reward_columns,
)
from gspo_megatron.rewards.shaping import Shaping
from gspo_megatron.rewards.values import Score
from gspo_megatron.rl.lockstep import Episodes, Lockstep
from gspo_megatron.rollout.engine import Draw, Requests, RolloutEngine, Sampling
from gspo_megatron.types import Prompt, RolloutBatch, Sample


@dataclass
class Scores:
    """The rewards of this rank's responses, in their order.

    `turn_rewards` and `turn_tokens` hold the turns of all responses, response after response.
    `turns` is 0 for a response whose turns were not rewarded. Where calls of the reward function
    failed, `rewards` is NaN, and `shaped` is NaN in the whole group.
    """

    rewards: Tensor  # [num_sequences] float64, as given: the sum of turns or of weighted parts
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
    sample_parts: list[dict[str, float]] = field(default_factory=list)  # none without parts
    # of episodes, their turns: see `environments.transcript`
    sample_records: Sequence[dict[str, Any]] = field(default_factory=list)
    parts: Tensor | None = None  # of one draw: [parts, num_sequences] float64, before weights
    # of one draw: calls of the reward function, and episodes, on all ranks
    failed_calls: FailedCalls = field(default_factory=FailedCalls)
    # of one draw, then of a step: wall seconds of scoring, on the slowest rank
    reward_seconds: float = 0.0
    # of one draw: [sum(response_lengths)] bool, tokens that the policy wrote; None: all
    sampled: Tensor | None = None
    # of one draw: [sampled tokens], updates that the weights have missed that drew a token
    staleness: Tensor | None = None
    # Of a whole step, the same on all ranks:
    metrics: dict[str, float] = field(default_factory=dict)  # over all responses sampled
    num_tokens: int = 0  # response tokens sampled
    rollout_seconds: float = 0.0
    has_turns: bool = False  # the reward function rewards turns
    sample_reasons: list[str] = field(default_factory=list)  # of one draw: why, for each sample

    def describe(self) -> dict[str, Any]:
        """All of a whole step but the tensors, for JSON. That of the main rank is saved."""
        left = ("batch", "scores", "parts", "failed_calls", "sampled", "staleness")
        left += ("sample_reasons",)
        kept = {k: v for k, v in vars(self).items() if k not in left}
        unread = {"fields": {}, "messages": []}  # they are not written to samples.jsonl
        samples = [dataclasses.asdict(sample) | unread for sample in self.samples]
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
    of_tokens = {"tokens": tokens, "routes": tokens, "in_response": tokens}
    of_tokens |= {"rollout_logprobs": responses, "mask": responses}
    chosen: dict[str, Any] = {
        name: None if value is None else value[of_tokens.get(name, rows)]
        for name, value in vars(batch).items()
    }
    return RolloutBatch(**chosen)


_Record = TypeVar("_Record", RolloutBatch, Scores)


def join(parts: Sequence[_Record]) -> _Record:
    """Records of flat tensors end to end."""
    columns = {name: [getattr(part, name) for part in parts] for name in vars(parts[0])}
    joined: dict[str, Any] = {
        name: None if values[0] is None else torch.cat(values) for name, values in columns.items()
    }
    return type(parts[0])(**joined)


class Collector:
    """Responses and their scores, on this rank; every rank calls everything.

    `rl.served_rollouts` has them drawn and scored by the rollout service; here this rank does both.
    """

    def __init__(
        self,
        config: Config,
        prompts: Mapping[str, Sequence[Prompt]],
        engine: RolloutEngine,
        environment: SingleTurn,
        reward: Reward,
        device: torch.device,
        lockstep: Lockstep | None = None,
    ) -> None:
        """prompts: by the key of the configuration that names their files; lockstep: runs episodes
        of several turns."""
        self.config, self.prompts = config, prompts
        self.engine, self.environment = engine, environment
        self.device, self.lockstep = device, lockstep
        self.data_group = data_parallel_group()
        self.shaping = Shaping(config.reward, config.rollout.max_response_tokens)
        self.scorer = Scorer(reward, config.reward)
        self.part_names: PartNames | None = None  # that all ranks know
        # is told how far sampling or scoring is, see Progress.doing
        self.tell: Callable[[str], None] = lambda text: None
        self.replica, _ = model_replica()
        self.reward_rank = dist.get_process_group_ranks(self.replica)[0]

    @property
    def has_episodes(self) -> bool:
        """Whether the policy acts in an environment of several turns."""
        return self.config.environment.has_episodes

    def take_weights(self, version: int) -> dict[str, float]:
        """Draw with the policy's present weights from now on; `version`: steps that it has made.
        Returns metrics."""
        self.engine.update_weights()
        return {}

    def after_checkpoint(self, step: int) -> None:
        """The run is saved after `step`: what was kept for a repetition of it may go."""

    def close(self) -> None:
        """The run ends."""
        self.scorer.close()

    def begin(self, draw: Draw) -> None:
        """The draw is wanted soon. Here nobody has time for it before `sample`."""

    def sample(self, draw: Draw) -> Experience:
        """Responses with their scores, to this rank's share of the prompts. Raises RewardError, on
        all ranks, as `score`."""
        prompts = self.prompts_of(draw)
        episodes = self.roll_out(prompts, draw.first, draw.per_prompt, draw.sampling, draw.seed)
        return self.score(episodes, prompts, draw.first)

    def prompts_of(self, draw: Draw) -> list[Prompt]:
        """All prompts of a draw."""
        return [self.prompts[draw.key][row] for row in draw.rows]

    def roll_out(
        self, prompts: Sequence[Prompt], first: int, per_prompt: int, sampling: Sampling, seed: int
    ) -> Episodes:
        """Responses to this rank's share of the prompts: every `data_size`-th of them, so that each
        data rank holds whole groups.

        `first` is the number of the first prompt in the step. The numbers of the samples follow
        from it, and all random numbers follow from these and the seed.
        """
        numbers = [n for n in range(first, first + len(prompts)) if self.is_mine(n)]
        mine = [prompts[n - first] for n in numbers]
        if self.lockstep is not None:
            return self.lockstep.run(mine, numbers, per_prompt, sampling, seed)
        requests = Requests([prompt.token_ids for prompt in mine], numbers, per_prompt)
        return Episodes(self.engine.generate(requests, sampling, seed))

    def is_mine(self, number: int) -> bool:
        """Whether the group with this number in its step is of this rank's share."""
        return number % self.data_group.size() == self.data_group.rank()

    def samples(
        self,
        batch: RolloutBatch,
        prompts: Sequence[Prompt],
        first: int,
        sampled: Tensor | None = None,
    ) -> list[Sample]:
        """The responses as text, on one rank of each model replica; nothing on the others.
        `sampled`: as in Experience."""
        if dist.get_rank() != self.reward_rank:
            return []
        columns = (batch.prompt_lengths, batch.response_lengths, batch.truncated)
        return self.environment.samples(
            batch.tokens.cpu(),
            *(column.cpu() for column in (*columns, batch.group_index)),
            prompts,
            first,
            None if sampled is None else sampled.cpu(),
            None if batch.in_response is None else batch.in_response.cpu(),
        )

    def score(self, episodes: Episodes, prompts: Sequence[Prompt], first: int) -> Experience:
        """The responses with what the environment or the reward function gives for them. The
        latter may be slow or not deterministic: one rank of each model replica calls it and sends
        the scores to the others.

        Raises RewardError, on all ranks, where it failed or gave no reward on any of them, and
        EpisodeError where an episode failed, unless `reward.on_failure` says otherwise.
        """
        batch, problem = episodes.batch, None
        samples = self.samples(batch, prompts, first, batch.mask)
        found: list[Score | None] = []
        failed = FailedCalls()
        calls_reward = dist.get_rank() == self.reward_rank
        if calls_reward:
            try:
                given = self.scorer.given(episodes.ended)
                with heard_by(lambda: self.tell(self.scorer.progress())):
                    found, failed = self.scorer.score(samples, given)
                self.tell("")
            except UserError as error:
                problem = error
        failed, seconds = self._agree(problem, failed)
        num_parts = len(self.part_names or ())
        scores = torch.zeros(
            (3 + num_parts, len(batch.sample_index)), dtype=torch.float64, device=self.device
        )
        turns = torch.zeros((2, 0), dtype=torch.float64, device=self.device)
        if calls_reward:
            groups = batch.group_index.tolist()
            columns = reward_columns(found, samples, groups, num_parts, self.shaping)
            scores, turns = (torch.as_tensor(values, device=self.device) for values in columns)
        if self.replica.size() > 1:
            dist.broadcast(scores, src=self.reward_rank, group=self.replica)
            number = int(scores[2].sum())
            if number:
                if not calls_reward:
                    turns = turns.new_empty((2, number))
                dist.broadcast(turns, src=self.reward_rank, group=self.replica)
        rewards, shaped, counts, *parts = scores
        return Experience(
            batch,
            Scores(rewards, shaped, counts.long(), turns[0], turns[1].long()),
            samples,
            rewards.tolist(),
            [dict(score.parts) if score else {} for score in found] if parts else [],
            records_of(episodes.ended, found) if calls_reward else [],
            scores[3:],
            failed,
            seconds,
            batch.mask,
            sample_reasons=[score.reason if score else "" for score in found],
        )

    def _agree(self, problem: UserError | None, failed: FailedCalls) -> tuple[FailedCalls, float]:
        """The failures of all ranks, and the seconds of the slowest, on all ranks; afterwards they
        know the names of the parts. Raises EpisodeError or RewardError, on all ranks, with the
        problem of any rank, or where names differ."""
        names = self.scorer.part_names
        has_news = problem is not None or names != self.part_names
        known = all_gather_numbers([has_news, *failed, self.scorer.take_seconds()])
        has_any, *counts = known[:, :-1].sum(0).long().tolist()
        found = FailedCalls(*counts), float(known[:, -1].max())  # each rank waits for the last
        if not has_any:
            return found
        mine = None if problem is None else (type(problem).__name__, str(problem))
        told = all_gather_objects((mine, names))
        problems = [found for found, _ in told if found is not None]
        if problems:
            others = f" (and on {len(problems) - 1} more ranks)" if len(problems) > 1 else ""
            error = error_of(problems[0][0], problems[0][1] + others)
            if not isinstance(error, EpisodeError):  # a reward may raise any UserError
                error = RewardError(str(error))
            raise error from problem
        parts = list(dict.fromkeys(names for _, names in told if names is not None))
        if len(parts) > 1:
            raise RewardError(
                f"reward {self.scorer.reward.name!r} returned "
                f"{' and '.join(map(describe, parts))} on different ranks; the same names are "
                "wanted in every call"
            )
        if parts:  # not where all calls failed
            self.part_names = self.scorer.part_names = parts[0]
        return found

    def measure(self, experience: Experience, metrics: StepMetrics) -> None:
        """Add the metrics of one draw."""
        batch, scores = experience.batch, experience.scores
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
        if self.shaping.is_on:
            means["reward/shaped_mean"] = mean_pair(shaped)
        assert experience.parts is not None, "not of one draw"
        for name, part in zip(self.part_names or (), experience.parts, strict=True):
            means[f"reward/{name}"] = mean_pair(part[scored])
        if (ages := experience.staleness) is not None:
            means["staleness/mean"] = mean_pair(ages)
            means["staleness/tokens_older_than_1"] = mean_pair(ages > 1)
            metrics.add_maximum("staleness/max", ages.max() if len(ages) else ages.sum())
            bound = self.config.objective.max_token_staleness
            if bound is not None:
                means["staleness/masked"] = mean_pair(ages > bound)
        if experience.sampled is not None:
            turns, branches = turns_and_branches(batch, experience.sampled)
            means["environment/turns"] = mean_pair(turns)
            means["environment/branches"] = mean_pair(branches)
            means["environment/sampled_share"] = mean_pair(experience.sampled)
        metrics.add_means(means)

    def reduce(self, metrics: StepMetrics) -> tuple[dict[str, float], bool]:
        """The metrics over all ranks and draws, and whether the reward function rewards turns.
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

    def lengths(self, of_draws: Sequence[Tensor]) -> dict[str, float]:
        """Percentiles of the response lengths [num_sequences] of all draws and ranks."""
        mine = torch.cat([lengths.long() for lengths in of_draws])
        lengths = torch.cat(all_gather_columns(mine, self.data_group)).double().cpu().numpy()
        levels = {"p50": 50, "p90": 90, "p99": 99, "max": 100}
        values = np.percentile(lengths, list(levels.values())).tolist()
        return {f"response/length_{name}": v for name, v in zip(levels, values, strict=True)}

    def judge_groups(
        self, experience: Experience, first: int, num_prompts: int
    ) -> tuple[list[bool], list[bool]]:
        """Which groups of one draw have different rewards, and in which a call of the reward
        function failed, by number; the same on all ranks."""
        groups, shaped = experience.batch.group_index, experience.scores.shaped
        failed = shaped.isnan()
        differs = (group_mean(shaped.nan_to_num(), groups) != 0) & ~failed  # 0 without spread
        found = torch.zeros((2, num_prompts), dtype=torch.long, device=self.device)
        found[0, groups[differs] - first] = 1
        found[1, groups[failed] - first] = 1
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
        draw = Draw(f"evaluation_{version:08d}", key, rows, 0, 1, greedy, training.seed, version)
        experience = self.sample(draw)
        correct_at, rewards = self.config.evaluation.correct_at, experience.scores.rewards
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
            raise self.nothing_scored("of an evaluation", [experience.failed_calls])
        if self.config.reward.on_failure == "drop_group":
            reduced["evaluation/failed"] = round(failed_share * len(rows))
        count = len(rows) - round(failed_share * len(rows))
        low, high = share_interval(reduced["evaluation/accuracy"], count)
        reduced |= {"evaluation/accuracy_low": low, "evaluation/accuracy_high": high}
        reduced["evaluation/prompts"] = count
        told = gather_objects(self.responses(experience, correct_at)) or []
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

    def responses(
        self, experience: Experience, correct_at: float
    ) -> list[tuple[int, dict[str, Any]]]:
        """This rank's records of evaluation.jsonl, with the numbers of their prompts."""
        found = []
        parts = experience.sample_parts or [{}] * len(experience.samples)
        records = experience.sample_records or [{}] * len(experience.samples)
        groups = experience.batch.group_index.tolist()
        reasons = experience.sample_reasons or [""] * len(experience.samples)
        rows = zip(experience.samples, experience.sample_rewards, parts, reasons, records, groups)
        for sample, reward, of_parts, reason, of_episode, group in rows:
            scored = not math.isnan(reward)
            record = {
                "row_id": sample.row_id,
                "prompt": sample.prompt,
                "answer": written_answer(sample),
                "response": sample.response,
                **({"transcript": sample.transcript} if sample.transcript else {}),
                "reward": reward if scored else None,
                **({"parts": of_parts} if of_parts else {}),
                **({"reason": reason} if reason else {}),
                "correct": reward >= correct_at if scored else None,
                "truncated": sample.truncated,
                "num_tokens": sample.num_tokens,
                **of_episode,
            }
            found.append((group, record))
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
