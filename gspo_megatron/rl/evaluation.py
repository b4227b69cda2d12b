"""Evaluation suites: k responses to each problem of a file, scored by the suite's own reward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gspo_megatron.config.schema import Config, suite_key
from gspo_megatron.evaluation.scores import figures_of_records
from gspo_megatron.observe.intervals import CONFIDENCE
from gspo_megatron.observe.suite_table import suite_text
from gspo_megatron.platform.collectives import on_main
from gspo_megatron.rewards.registry import suite_rewards
from gspo_megatron.rl.rollouts import Collector
from gspo_megatron.rollout.engine import RolloutRequest, Sampling
from gspo_megatron.rollout.episodes import GroupScorer
from gspo_megatron.rollout.types import RolloutGroup

Record = dict[str, Any]  # a response in evaluation.jsonl


class Suites:
    """The suites of a run. Every rank calls every method."""

    def __init__(self, config: Config, collector: Collector) -> None:
        self.config, self.collector = config, collector
        suites, tokenizer = config.evaluation.suites, collector.scorer.tokenizer
        self.scorers = {
            name: GroupScorer.of(config, tokenizer, reward, suites[name].reward)
            for name, reward in suite_rewards(suites).items()
        }

    def close(self) -> None:
        """Free the resources of the rewards."""
        for scorer in self.scorers.values():
            scorer.close()

    def evaluate(self, version: int) -> tuple[dict[str, float], list[Record]]:
        """Evaluate all suites. Returns metrics, and on the main rank the responses.

        The metrics are evaluation/SUITE/FIGURE, see `suite_figures`. version: the number of steps
        that the policy has been trained for. Raises, on all ranks, the errors of
        `Collector.sample`; also EpisodeError or RewardError if no problem of a suite has the
        rewards of all its responses.
        """
        metrics: dict[str, float] = {}
        everything: list[Record] = []
        for name in self.scorers:
            request = self._request(name, version)
            # Router noise imitates the rollout engine. It is no part of the policy, so an
            # evaluation has none.
            share = self.collector.sample(request, self.scorers[name], router_noise=False)
            records = self._records(name, request, share.group)
            figures = on_main(lambda name=name, records=records: self._figures(name, records))
            if figures is None:
                reward, failed = self.scorers[name].reward, [share.failed_calls]
                raise self.collector.nothing_scored(f"of the suite {name}", failed, reward)
            metrics |= {f"evaluation/{name}/{key}": value for key, value in figures.items()}
            everything += records
        return metrics, everything

    def _request(self, name: str, version: int) -> RolloutRequest:
        config, suite, key = self.config, self.config.evaluation.suites[name], suite_key(name)
        sampling = Sampling(
            config.suite_response_tokens(name),
            suite.temperature,
            suite.top_p,
            suite.top_k,
            tuple(config.rollout.stop),
        )
        rows, seed = list(range(len(self.collector.prompts[key]))), config.training.seed
        named = f"evaluation_{version:08d}_{name}"
        return RolloutRequest(named, key, rows, 0, suite.samples, sampling, seed, version)

    def _records(self, name: str, request: RolloutRequest, group: RolloutGroup) -> list[Record]:
        """Return the responses of all ranks on the main rank, in the order of the problems.

        Other ranks get an empty list. Raises RewardError on all ranks if the reward cannot read an
        answer.
        """
        suite, reward = self.config.evaluation.suites[name], self.scorers[name].reward
        least = self.config.evaluation.correct_at if suite.correct_at is None else suite.correct_at
        records = self.collector.records(request, group, least, reward.answer_in)
        return [
            {"suite": name, "problem": number, "sample": place % suite.samples, **record}
            for place, (number, record) in enumerate(records)
        ]

    def _figures(self, name: str, records: Sequence[Record]) -> dict[str, float] | None:
        """Compute the figures of a suite. Returns None if no problem of the suite has the rewards
        of all its responses."""
        suite, seed = self.config.evaluation.suites[name], self.config.training.seed
        try:
            return figures_of_records(records, suite, seed)
        except ValueError:
            return None


def accuracy_text(metrics: Mapping[str, float], correct_at: float) -> str:
    """Describe the held-out accuracy of these metrics with its interval, for people."""
    low, high = metrics["evaluation/accuracy_low"], metrics["evaluation/accuracy_high"]
    interval = f"{CONFIDENCE:.0%} interval {low:.3f} to {high:.3f}"
    of = f"of {metrics['evaluation/prompts']:.0f} prompts"
    return f"{metrics['evaluation/accuracy']:.3f} (reward >= {correct_at:g}), {interval} {of}"


def lines_of(config: Config, metrics: Mapping[str, float]) -> Iterator[str]:
    """Yield a line for people to read about each suite in these metrics."""
    for name in config.evaluation.suites:
        prefix = f"evaluation/{name}/"
        figures = {k.removeprefix(prefix): v for k, v in metrics.items() if k.startswith(prefix)}
        if figures:
            yield f"{name}: {suite_text(figures)}"
