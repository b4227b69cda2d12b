"""Evaluation on held-out prompts: one greedy response for each."""

from __future__ import annotations

from collections.abc import Sequence

from gspo_megatron.config import Config
from gspo_megatron.platform.reduce_metrics import StepMetrics
from gspo_megatron.rl.rollouts import Collector, mean_pair
from gspo_megatron.rollout.engine import Sampling
from gspo_megatron.types import Prompt


def evaluate(config: Config, prompts: Sequence[Prompt], collector: Collector) -> dict[str, float]:
    """Mean reward as the reward function gives it, and accuracy: the share with full reward (1).
    Nothing without prompts. Every rank calls it."""
    prompts = prompts[: config.training.evaluation_prompts]
    if not prompts:
        return {}
    rollout = config.rollout
    greedy = Sampling(rollout.max_response_tokens, temperature=0.0, stop=tuple(rollout.stop))
    batch = collector.roll_out(prompts, 0, 1, greedy, config.training.seed)
    rewards = collector.score(batch, prompts, 0).scores.rewards
    metrics = StepMetrics(collector.device)
    metrics.add_means(
        {"evaluation/reward": mean_pair(rewards), "evaluation/accuracy": mean_pair(rewards >= 1.0)}
    )
    return metrics.reduce(collector.data_group)
