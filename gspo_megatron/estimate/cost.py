"""Estimates the hours of a whole run from the estimate of its layout: training, and generation by
the training model itself."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gspo_megatron.config import Config
from gspo_megatron.estimate.layout import LayoutEstimate
from gspo_megatron.estimate.traffic import step_cost

MEMORY_BYTES = 0.6 * 3.35e12  # bytes per second that an H100 reads from its memory


@dataclass(frozen=True)
class RunCost:
    """The estimated times of a run."""

    steps: int
    train_seconds: float  # of a step
    generate_seconds: float | None  # of a step; None: servers generate the responses
    ranks: int

    @property
    def hours(self) -> float:
        return self.steps * (self.train_seconds + (self.generate_seconds or 0.0)) / 3600

    @property
    def gpu_hours(self) -> float:
        return self.hours * self.ranks


def run_cost(estimate: LayoutEstimate, active_parameters: int) -> RunCost | None:
    """Estimate the time of a run. Returns None for a supervised stage, whose number of steps may
    depend on its data."""
    config = estimate.config
    if not isinstance(config, Config):
        return None
    cost = step_cost(
        config, estimate.parallel, estimate.work, active_parameters, estimate.most_traffic()
    )
    sizes = estimate.parallel.layout
    ranks = estimate.parallel.world_size
    generate = None
    if config.rollout.engine == "megatron":
        # A pass gives each response one token. A pass goes through the pipeline stages one after
        # the other, and reads the weights, keys and values of each stage. On average half of the
        # cache is filled.
        replicas = ranks // (sizes.tp * sizes.pp * sizes.cp)
        responses = math.ceil(
            config.rollout.prompts_per_step * config.rollout.group_size / replicas
        )
        at_once = min(responses, config.rollout.batch_size or responses)
        passes = math.ceil(responses / at_once) * config.rollout.max_response_tokens
        read = sum(estimate.worst.state.parameters.values()) + estimate.worst.kv_cache / 2
        generate = passes * sizes.pp * read / MEMORY_BYTES
    return RunCost(config.training.steps, cost.total, generate, ranks)
