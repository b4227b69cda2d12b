"""What the phases of a run share."""

from __future__ import annotations

from dataclasses import dataclass

from gspo_megatron.batching.micro_batches import MicroBatchBuilder
from gspo_megatron.checkpoint.manager import Checkpoints
from gspo_megatron.config import Config
from gspo_megatron.data.inputs import Inputs
from gspo_megatron.models.build import Policy
from gspo_megatron.objectives import Objective
from gspo_megatron.observe.run_logger import RunLogger
from gspo_megatron.rl.rollouts import ExperienceCollector
from gspo_megatron.rollout.engine import RolloutEngine, Sampling


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
    record: RunLogger
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
