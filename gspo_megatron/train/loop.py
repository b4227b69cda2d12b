"""The order of things: warm start, evaluation, RL steps."""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core import parallel_state

from gspo_megatron.config import Config
from gspo_megatron.config.objectives import resolve_objective
from gspo_megatron.data.inputs import Inputs
from gspo_megatron.data.loader import PromptLoader
from gspo_megatron.models.build import Policy
from gspo_megatron.models.optimizer import Schedule, build_trainer
from gspo_megatron.objectives import Objective
from gspo_megatron.rollout.engine import RolloutEngine, Sampling
from gspo_megatron.train.exchange import exchange, index_step
from gspo_megatron.train.experience import ExperienceCollector
from gspo_megatron.train.plan import MiniBatch, plan_step
from gspo_megatron.train.record import RunRecord
from gspo_megatron.train.schedule import MicroBatchBuilder
from gspo_megatron.train.step import PolicyUpdater
from gspo_megatron.train.warm_start import SupervisedUpdater, micro_batch_multiple
from gspo_megatron.types import Prompt

# Steps between two looks at the held-out accuracy during a warm start that has a target.
LOOK_EVERY = 5


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


def warm_start(job: Job) -> None:
    """Supervised steps on prompt and answer, with an optimizer of their own."""
    config = job.config
    section = config.training.warm_start
    if section.steps == 0:
        return
    schedule = Schedule(
        section.learning_rate,
        section.learning_rate,
        section.warmup_steps,
        section.steps,
        "constant",
    )
    trainer = build_trainer(job.policy, config.optimizer, schedule)
    updater = SupervisedUpdater(
        job.policy, trainer, job.builder, config.training.micro_batch_tokens
    )
    prompts = job.inputs.supervised
    tokenizer = job.inputs.tokenizer
    answers = [(*tokenizer.encode(p.answer), tokenizer.eos_id) for p in prompts]
    loader = PromptLoader(len(prompts), section.batch_size, config.training.seed, shuffle=True)
    with job.record.progress(section.steps, "warm start (supervised)") as progress:
        for step in range(1, section.steps + 1):
            chosen = loader.next()
            metrics = updater.update(
                [prompts[i].token_ids for i in chosen], [answers[i] for i in chosen]
            )
            if section.target_accuracy and step % LOOK_EVERY == 0:
                metrics |= held_out(job)
            job.record.write("warm_start", step, metrics)
            progress.update(step, metrics)
            if metrics.get("evaluation/accuracy", 0.0) >= (section.target_accuracy or math.inf):
                progress.note(f"held-out accuracy {metrics['evaluation/accuracy']:.3f}: enough")
                return


class ReinforcementLoop:
    """RL steps: roll out, score, update, write down."""

    def __init__(self, job: Job) -> None:
        self.job, self.config = job, job.config
        config = job.config
        updates_per_step = config.objective.mini_batches
        schedule = Schedule(
            peak=config.optimizer.learning_rate,
            floor=config.optimizer.min_learning_rate,
            warmup=config.optimizer.warmup_steps * updates_per_step,
            total=config.training.steps * updates_per_step,
            decay=config.optimizer.decay,
        )
        trainer = build_trainer(job.policy, config.optimizer, schedule)
        rollout = config.rollout
        self.updater = PolicyUpdater(
            job.policy, trainer, job.builder, job.objective, config.objective, config.routing
        )
        self.noise_was_said = False
        self.sampling = Sampling(
            max_tokens=rollout.max_response_tokens,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            stop=tuple(rollout.stop),
        )
        self.loader = PromptLoader(
            len(job.inputs.train),
            rollout.prompts_per_step,
            config.training.seed,
            shuffle=config.data.shuffle,
        )
        self.data_group = parallel_state.get_data_parallel_group(with_context_parallel=True)

    def run(self) -> None:
        """All steps of the configuration, with evaluations before, between and after."""
        steps, interval = self.config.training.steps, self.config.training.evaluation_interval
        record = self.job.record
        with record.progress(steps, self.job.objective.name) as progress:
            before = held_out(self.job)
            if before:
                record.write("rl", 0, before)
                progress.note(f"held-out accuracy before RL: {before['evaluation/accuracy']:.3f}")
                progress.update(0, before)
            for step in range(1, steps + 1):
                metrics = self.step(step)
                if step == steps or (interval and step % interval == 0):
                    metrics |= held_out(self.job)
                record.write("rl", step, metrics)
                progress.update(step, metrics)
                warning = self._noise_warning(metrics)
                if warning:
                    progress.note(warning)

    def _noise_warning(self, metrics: dict[str, float]) -> str | None:
        """Said once, when the clip range lies inside what the sequence ratios would vary by without
        any learning: there the clip cuts noise."""
        section = self.config.objective
        if self.noise_was_said or section.import_path is not None:
            return None
        recipe, floor = resolve_objective(section), metrics["ratio/noise_floor"]
        if not recipe.clips_sequences:
            return None
        narrow = min(recipe.parameters["clip_low"], recipe.parameters["clip_high"])
        if floor <= narrow:
            return None
        self.noise_was_said = True
        if section.old_logprobs == "rollout":
            advice = "widen objective.clip_low and clip_high, or set old_logprobs = recompute"
        else:
            advice = (
                "old_logprobs = recompute keeps it out of the ratio, but not out of the samples"
            )
        return (
            f"warning: the clip range {narrow:g} is narrower than the noise of the sequence ratio, "
            f"{floor:.2g} (ratio/noise_floor: trainer against rollout engine, same weights): "
            f"{advice}"
        )

    def step(self, step: int) -> dict[str, float]:
        """One RL step. Returns its metrics, the same on every rank."""
        start = time.perf_counter()
        job, config = self.job, self.config
        seed = (config.training.seed << 32) + step
        experience = job.collector.collect(self._draw, self.sampling, seed)
        index = index_step(experience.batch, experience.rewards, self.data_group)
        plan = self._plan(index.lengths, index.response_lengths)
        sequences = exchange(
            experience.batch,
            index,
            self._destinations(plan, len(index.lengths)),
            self.data_group,
            experience.token_advantages,
        )
        update = self.updater.update(sequences, index, plan)
        sync_start = time.perf_counter()
        job.engine.update_weights()
        now = time.perf_counter()
        metrics = experience.metrics | update.metrics
        metrics["ratio/noise_floor"] = metrics.pop("ratio/noise_floor_squared") ** 0.5
        metrics |= {
            "perf/step_seconds": now - start,
            "perf/rollout_seconds": experience.rollout_seconds,
            "perf/logprob_seconds": update.seconds["logprob"],
            "perf/train_seconds": update.seconds["train"],
            "perf/sync_seconds": now - sync_start,
            "perf/tokens_per_second": experience.num_tokens / (now - start),
            "perf/peak_memory_bytes": peak_memory_bytes(),
        }
        if job.record.is_main:
            job.record.write_samples(step, *job.collector.samples(experience))
        return metrics

    def _draw(self) -> list[Prompt]:
        """The next prompts, the same on every rank."""
        return [self.job.inputs.train[i] for i in self.loader.next()]

    def _plan(self, lengths: Sequence[int], responses: Sequence[int]) -> list[MiniBatch]:
        return plan_step(
            lengths,
            responses,
            # dynamic sampling may leave fewer sequences than that
            mini_batches=min(self.config.objective.mini_batches, len(lengths)),
            data_parallel_size=parallel_state.get_data_parallel_world_size(),
            token_budget=self.config.training.micro_batch_tokens
            * self.job.policy.config.context_parallel_size,
            micro_batch_multiple=micro_batch_multiple(self.job.policy),
            padded=self.job.builder.padded,
        )

    def _destinations(self, plan: Sequence[MiniBatch], count: int) -> list[list[int]]:
        """The data ranks (all CP ranks of a data-parallel rank) that train on each sequence."""
        cp = self.job.policy.config.context_parallel_size
        destinations: list[list[int]] = [[] for _ in range(count)]
        for mini_batch in plan:
            for rank, micro_batches in enumerate(mini_batch.micro_batches):
                for number in (n for members in micro_batches for n in members):
                    destinations[number] = list(range(rank * cp, (rank + 1) * cp))
        return destinations


def peak_memory_bytes() -> int:
    """Largest device memory of this process so far; its resident memory on a CPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
