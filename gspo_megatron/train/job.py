"""What the phases of a run share."""

from __future__ import annotations

from dataclasses import dataclass

from gspo_megatron.config import Config
from gspo_megatron.data.inputs import Inputs
from gspo_megatron.models.build import Policy
from gspo_megatron.objectives import Objective
from gspo_megatron.rollout.engine import RolloutEngine, Sampling
from gspo_megatron.train.checkpointing import Checkpoints
from gspo_megatron.train.experience import ExperienceCollector
from gspo_megatron.train.record import RunRecord
from gspo_megatron.train.schedule import MicroBatchBuilder


@dataclass
class Job:
    """A run's parts, as `train.run` puts them together."""

    config: Config
    policy: Policy
    inputs: Inputs
    engine: RolloutEngine
    collector: ExperienceCollector
    builder: MicroBatchBuilder
    objective: Objective
    record: RunRecord
    checkpoints: Checkpoints


def held_out(job: Job) -> dict[str, float]:
    """Greedy answers to the held-out prompts; nothing without such prompts."""
    config = job.config
    prompts = job.inputs.evaluation[: config.training.evaluation_prompts]
    if not prompts:
        return {}
    greedy = Sampling(
        config.rollout.max_response_tokens, temperature=0.0, stop=tuple(config.rollout.stop)
    )
    return job.collector.evaluate(prompts, greedy, config.training.seed)
