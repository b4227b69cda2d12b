"""RL: evaluation, and steps of rolling out, scoring, updating and writing down."""

from __future__ import annotations

import time
from collections.abc import Sequence

from megatron.core import parallel_state

from gspo_megatron.batching.micro_batches import micro_batch_multiple
from gspo_megatron.batching.plan import MiniBatch, plan_step
from gspo_megatron.batching.redistribute import exchange, index_step
from gspo_megatron.config.objectives import resolve_objective
from gspo_megatron.data.loader import PromptLoader
from gspo_megatron.models.optimizer import build_trainer
from gspo_megatron.observe.metrics_files import RL
from gspo_megatron.platform.devices import peak_memory_bytes
from gspo_megatron.rl.components import Job, held_out
from gspo_megatron.rl.dumps import StepDumps
from gspo_megatron.rl.policy_update import PolicyUpdater, learning_rates
from gspo_megatron.rl.rollout_store import RolloutBuffer
from gspo_megatron.rollout.engine import Sampling
from gspo_megatron.types import Prompt

# A warning that is given once in a run, resumed or not.
_NOISE = "ratio/noise_floor"


class ReinforcementLoop:
    """RL steps: roll out, score, update, write down."""

    def __init__(self, job: Job) -> None:
        """Goes on where the run's checkpoint was taken, if it is one of this phase."""
        self.job, self.config = job, job.config
        config = job.config
        rollout, needs_reference = config.rollout, job.objective.needs_reference
        if needs_reference:
            job.checkpoints.begin_reference()
        self.trainer = build_trainer(job.policy, config.optimizer, learning_rates(config))
        self.updater = PolicyUpdater(
            job.policy, self.trainer, job.builder, job.objective, config.objective, config.routing
        )
        if needs_reference:
            job.checkpoints.end_reference()
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
        self.done = job.checkpoints.restore(RL, self.trainer, self.loader)
        # of the step after those, where the run stopped in the middle of it
        self.rollouts = job.checkpoints.restored_rollouts()
        self.dumps = StepDumps(config, job.policy, job.record)

    def run(self) -> None:
        """The steps of the configuration that are not done yet, with evaluations before, between
        and after. Raises StopRun where the run was told to stop, and is saved."""
        steps, interval = self.config.training.steps, self.config.training.evaluation_interval
        record, checkpoints = self.job.record, self.job.checkpoints
        with record.progress(steps, self.job.objective.name, self.done) as progress:
            if self.done == 0 and self.rollouts is None:
                before = held_out(self.job)
                if before:
                    record.write(RL, 0, before)
                    accuracy = before["evaluation/accuracy"]
                    progress.note(f"held-out accuracy before RL: {accuracy:.3f}")
                    progress.update(0, before)
            for step in range(self.done + 1, steps + 1):
                metrics = self.step(step)
                if step == steps or (interval and step % interval == 0):
                    metrics |= held_out(self.job)
                record.write(RL, step, metrics)
                progress.update(step, metrics)
                warning = self._noise_warning(metrics)
                if warning:
                    progress.note(warning)
                checkpoints.end_of_step(
                    RL, step, self.trainer, self.loader, metrics, is_last=step == steps
                )

    def _noise_warning(self, metrics: dict[str, float]) -> str | None:
        """Said once, when the clip range lies inside what the sequence ratios would vary by without
        any learning: there the clip cuts noise."""
        section, said = self.config.objective, self.job.checkpoints.said
        if _NOISE in said or section.import_path is not None:
            return None
        recipe, floor = resolve_objective(section), metrics["ratio/noise_floor"]
        if not recipe.clips_sequences:
            return None
        narrow = min(recipe.parameters["clip_low"], recipe.parameters["clip_high"])
        if floor <= narrow:
            return None
        said.append(_NOISE)
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
        job = self.job
        rollouts = self._roll_out(step)
        self.dumps.write(step, rollouts)
        index = index_step(rollouts.batch, rollouts.rewards, self.data_group)
        plan = self._plan(index.lengths, index.response_lengths)
        sequences = exchange(
            rollouts.batch,
            index,
            self._destinations(plan, len(index.lengths)),
            self.data_group,
            rollouts.token_advantages,
        )
        update = self.updater.update(sequences, index, plan)
        sync_start = time.perf_counter()
        job.engine.update_weights()
        now = time.perf_counter()
        metrics = rollouts.metrics | update.metrics
        metrics["ratio/noise_floor"] = metrics.pop("ratio/noise_floor_squared") ** 0.5
        metrics |= {
            "perf/step_seconds": now - start,
            "perf/rollout_seconds": rollouts.rollout_seconds,
            "perf/logprob_seconds": update.seconds["logprob"],
            "perf/train_seconds": update.seconds["train"],
            "perf/sync_seconds": now - sync_start,
            "perf/tokens_per_second": rollouts.num_tokens / (now - start),
            "perf/peak_memory_bytes": peak_memory_bytes(),
        }
        job.record.write_samples(step, rollouts.samples, rollouts.sample_rewards)
        return metrics

    def _roll_out(self, step: int) -> RolloutBuffer:
        """The step's responses with their rewards: sampled now, or before the run was stopped."""
        rollouts, self.rollouts = self.rollouts, None
        if rollouts is not None:
            return rollouts
        job = self.job
        seed = (self.config.training.seed << 32) + step
        experience = job.collector.collect(self._draw, self.sampling, seed)
        shown = job.collector.samples(experience) if job.record.is_main else ([], [])
        rollouts = RolloutBuffer.of(experience, shown)
        job.checkpoints.after_rollouts(step, self.trainer, self.loader, rollouts)
        return rollouts

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
