"""The RL step on a page.

    prompts -> responses -> rewards -> advantages -> plan -> redistribute -> old log-probs
            -> one optimizer update for each mini-batch -> weights to the rollout engine -> log

`ReinforcementLoop.step` is the whole step; every rank runs the same lines.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from gspo_megatron.batching.micro_batches import (
    MicroBatch,
    MicroBatchBuilder,
    forward_backward,
    micro_batch_multiple,
    response_logprobs,
)
from gspo_megatron.batching.plan import MiniBatch, data_ranks, plan_step
from gspo_megatron.batching.redistribute import Sequences, StepIndex, gather_index, redistribute
from gspo_megatron.checkpoint.manager import Checkpoints
from gspo_megatron.config import Config
from gspo_megatron.config.objectives import resolve_objective
from gspo_megatron.config.schema import ObjectiveSection, RoutingSection
from gspo_megatron.data.inputs import Inputs
from gspo_megatron.data.loader import PromptLoader
from gspo_megatron.models.build import Policy
from gspo_megatron.models.optimizer import Schedule, Trainer, build_trainer, zero_gradients
from gspo_megatron.models.reference import ReferencePolicy
from gspo_megatron.objectives import Objective
from gspo_megatron.objectives.advantages import AdvantageEstimator
from gspo_megatron.objectives.parts import divergence, segment_sum
from gspo_megatron.observe.metrics_files import RL
from gspo_megatron.observe.run_logger import RunLogger
from gspo_megatron.platform.devices import peak_memory_bytes
from gspo_megatron.platform.groups import data_parallel_group
from gspo_megatron.platform.reduce_metrics import (
    StepMetrics,
    mismatch_metrics,
    share_with_all_stages,
)
from gspo_megatron.rl.dumps import StepDumps
from gspo_megatron.rl.rollout_store import read_experience, write_rollouts
from gspo_megatron.rl.rollouts import Collector, Experience, collect
from gspo_megatron.rl.routing_replay import RoutingReplay, RoutingReplayOff
from gspo_megatron.rollout.engine import Sampling
from gspo_megatron.types import LossInputs, LossOutputs, Prompt

NOISE_WARNING = "ratio/noise_floor"  # given once in a run, resumed or not


@dataclass
class RunComponents:
    """The parts of an RL run, as `rl.run` puts them together."""

    config: Config
    policy: Policy
    inputs: Inputs
    collector: Collector
    builder: MicroBatchBuilder
    objective: Objective
    logger: RunLogger
    checkpoints: Checkpoints


class ReinforcementLoop:
    """RL steps, with evaluations and checkpoints between them."""

    def __init__(self, run: RunComponents) -> None:
        """Continues where the run's checkpoint was taken, if there is one."""
        self.run_components, self.config, rollout = run, run.config, run.config.rollout
        with run.checkpoints.reference_weights(needed=run.objective.needs_reference):
            self.trainer = build_trainer(
                run.policy, self.config.optimizer, learning_rates(self.config)
            )
            self.updater = PolicyUpdater(
                run.policy,
                self.trainer,
                run.builder,
                run.objective,
                self.config.objective,
                self.config.routing,
            )
        self.collector, self.device = run.collector, run.builder.device
        self.sampling = Sampling(
            max_tokens=rollout.max_response_tokens,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            stop=tuple(rollout.stop),
        )
        self.loader = PromptLoader(
            len(run.inputs.train),
            rollout.prompts_per_step,
            self.config.training.seed,
            shuffle=self.config.data.shuffle,
        )
        self.data_group = data_parallel_group()
        self.done = run.checkpoints.restore(RL, self.trainer, self.loader)
        # The responses of the next step, if the run was stopped between them and its update.
        start = run.checkpoints.start
        self.restored: Experience | None = None
        if start.checkpoint is not None and start.state and start.state.rollouts is not None:
            self.restored = read_experience(start.checkpoint, start.state.rollouts, run.policy)
        self.dumps = StepDumps(self.config, run.policy, run.logger)

    def step(self, step: int) -> dict[str, float]:
        """One RL step. Returns its metrics, the same on every rank."""
        start, timer = time.perf_counter(), PhaseTimer(self.device)
        experience = self.roll_out(step)
        self.dumps.write(step, experience)
        index = gather_index(experience.batch, experience.scores.shaped, self.data_group)
        advantages, token_advantages = compute_advantages(
            self.updater.objective.advantages, experience, index
        )
        plan = self.plan(index)
        sequences = redistribute(
            experience.batch,
            index,
            data_ranks(plan, len(index.lengths)),
            self.data_group,
            context_parallel_size=parallel_state.get_context_parallel_world_size(),
            token_advantages=token_advantages,
        )
        metrics = update_policy(self.updater, sequences, index, plan, advantages, timer)
        with timer("sync"):
            self.collector.engine.update_weights()
        seconds = time.perf_counter() - start
        return {
            **experience.metrics,
            **metrics,
            "perf/step_seconds": seconds,
            "perf/rollout_seconds": experience.rollout_seconds,
            **timer.seconds,
            "perf/tokens_per_second": experience.num_tokens / seconds,
            "perf/peak_memory_bytes": peak_memory_bytes(),
        }

    def run(self) -> None:
        """All steps that are not done yet. Raises StopRun if the run was told to stop, and is saved
        then."""
        steps, interval = self.config.training.steps, self.config.training.evaluation_interval
        run, logger = self.run_components, self.run_components.logger
        with logger.progress(steps, run.objective.name, self.done) as progress:
            if self.done == 0 and self.restored is None:
                before = self.collector.evaluate(run.inputs.evaluation)
                if before:
                    logger.write(RL, 0, before)
                    accuracy = before["evaluation/accuracy"]
                    progress.note(f"held-out accuracy before RL: {accuracy:.3f}")
                    progress.update(0, before)
            for step in range(self.done + 1, steps + 1):
                metrics = self.step(step)
                if step == steps or (interval and step % interval == 0):
                    metrics |= self.collector.evaluate(run.inputs.evaluation)
                logger.write(RL, step, metrics)
                progress.update(step, metrics)
                warning = self._noise_warning(metrics)
                if warning:
                    progress.note(warning)
                run.checkpoints.end_of_step(
                    RL, step, self.trainer, self.loader, metrics, is_last=step == steps
                )

    # The parts of a step, in their order

    def roll_out(self, step: int) -> Experience:
        """The step's responses with their rewards: those that an earlier start of the run saved, or
        new ones."""
        restored, self.restored = self.restored, None
        if restored is None:
            run, seed = self.run_components, (self.config.training.seed << 32) + step

            def draw() -> list[Prompt]:
                return [run.inputs.train[i] for i in self.loader.next()]

            experience = collect(self.collector, draw, self.sampling, seed)
            run.checkpoints.after_rollouts(
                step,
                self.trainer,
                self.loader,
                experience.describe(),
                lambda folder: write_rollouts(experience, folder, run.policy),
            )
        else:
            experience = restored
        self.run_components.logger.write_samples(
            step, experience.samples, experience.sample_rewards
        )
        return experience

    def plan(self, index: StepIndex) -> list[MiniBatch]:
        """Which data-parallel rank trains on which sequences, in which micro-batches."""
        policy, builder = self.run_components.policy, self.run_components.builder
        return plan_step(
            index.lengths,
            index.response_lengths,
            # dynamic sampling may leave fewer sequences than mini-batches
            mini_batches=min(self.config.objective.mini_batches, len(index.lengths)),
            data_parallel_size=parallel_state.get_data_parallel_world_size(),
            token_budget=self.config.training.micro_batch_tokens
            * policy.config.context_parallel_size,
            micro_batch_multiple=micro_batch_multiple(policy),
            padded=builder.padded,
        )

    def _noise_warning(self, metrics: dict[str, float]) -> str | None:
        """Given once, if sequence ratios vary by more than the clip range without any learning: the
        clip then cuts noise."""
        section, warned = self.config.objective, self.run_components.checkpoints.warned
        if NOISE_WARNING in warned or section.import_path is not None:
            return None
        recipe, floor = resolve_objective(section), metrics["ratio/noise_floor"]
        if not recipe.clips_sequences:
            return None
        narrow = min(recipe.parameters["clip_low"], recipe.parameters["clip_high"])
        if floor <= narrow:
            return None
        warned.append(NOISE_WARNING)
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


def compute_advantages(
    estimator: AdvantageEstimator, experience: Experience, index: StepIndex
) -> tuple[Tensor, Tensor | None]:
    """Advantages of sequences, [num_sequences] float32 of the whole step. If the reward function
    rewards turns, also those of tokens, [response tokens] float32 of this rank's responses."""
    scores, batch = experience.scores, experience.batch
    of_sequences = estimator.of_sequences(index.rewards, torch.tensor(index.groups))
    of_tokens = None
    if experience.has_turns:
        of_tokens = estimator.of_turns(
            scores.turn_rewards, scores.turns, scores.turn_tokens, batch.group_index
        )
    return of_sequences.to(batch.tokens.device), of_tokens


def update_policy(
    updater: PolicyUpdater,
    sequences: Sequences,
    index: StepIndex,
    plan: Sequence[MiniBatch],
    advantages: Tensor,
    timer: PhaseTimer | None = None,
) -> dict[str, float]:
    """The second half of a step: the optimizer updates on this rank's `sequences`. Returns their
    metrics, the same on every rank. `advantages`: [num_sequences] of the whole step."""
    timer = timer or PhaseTimer(updater.device)
    with timer("logprob"):
        mini_batches = updater.build_micro_batches(plan, sequences, index)
        updater.compute_old_logprobs(mini_batches)
        if updater.penalizes_rewards:  # objective.kl_in: reward
            advantages = updater.penalized_advantages(mini_batches, index)
    with timer("train"):
        for mini_batch, micro_batches in zip(plan, mini_batches, strict=True):
            updater.train(mini_batch, micro_batches, advantages)
    return updater.reduce_metrics()


class PolicyUpdater:
    """The parts of a policy update, which `rl.loop.update_policy` calls in their order."""

    def __init__(
        self,
        policy: Policy,
        trainer: Trainer,
        builder: MicroBatchBuilder,
        objective: Objective,
        section: ObjectiveSection,
        routing: RoutingSection | None = None,
    ) -> None:
        """The reference policy, if the objective needs one, is the policy as it is now."""
        self.policy, self.trainer, self.builder = policy, trainer, builder
        self.objective, self.section = objective, section
        self.device = builder.device
        self.reference = None
        if objective.needs_reference:
            self.reference = ReferencePolicy(policy, offload=section.reference_offload)
        self.penalizes_rewards = self.reference is not None and section.kl_in == "reward"
        self.replay = RoutingReplayOff()
        if routing is not None and (routing.modes or routing.volatility):
            self.replay = RoutingReplay(policy, routing, self.device)
        self.cp_group = parallel_state.get_context_parallel_group()
        self.data_group = data_parallel_group()
        self.pipeline_group = parallel_state.get_pipeline_model_parallel_group()
        self.is_last_stage = parallel_state.is_pipeline_last_stage(ignore_virtual=True)

    def build_micro_batches(
        self, plan: Sequence[MiniBatch], sequences: Sequences, index: StepIndex
    ) -> list[list[MicroBatch]]:
        """This data rank's micro-batches of each mini-batch. A new step begins."""
        self._metrics = StepMetrics(self.device)
        self._updates: list[tuple[float, float]] = []  # gradient norm and learning rate of each
        mini_batches = self.builder.build_step(plan, sequences, index)
        sequences.routes = None  # the micro-batches have them
        for micro_batch in chain.from_iterable(mini_batches):
            micro_batch.head.entropy_gradient = self.objective.needs_entropy_gradient
        self.replay.start(mini_batches)
        return mini_batches

    def compute_old_logprobs(self, mini_batches: Sequence[Sequence[MicroBatch]]) -> None:
        """Log-probs under the policy at the start of the step, and under the reference policy.

        The first mini-batch needs no pass for its old log-probs: no update lies between, so they
        are those of its training pass.
        """
        everything = list(chain.from_iterable(mini_batches))
        covers_first = self.penalizes_rewards or self.replay.records_all
        wanted = everything if covers_first else everything[len(mini_batches[0]) :]
        recomputes = self.section.old_logprobs == "recompute"
        if recomputes or self.replay.records:
            with self.replay.old_pass(wanted):
                self._record(wanted, "old_logprobs")
        if not recomputes:
            for micro_batch in everything:
                micro_batch.old_logprobs = micro_batch.rollout_logprobs
        if self.reference is not None:
            with self.replay.reference_pass(everything), self.reference.in_place():
                self._record(everything, "reference_logprobs")

    def penalized_advantages(
        self, mini_batches: Sequence[Sequence[MicroBatch]], index: StepIndex
    ) -> Tensor:
        """[num_sequences] float32: advantages of the rewards, from each of which the divergence
        from the reference policy is taken off, summed over the response's tokens."""
        penalties = torch.zeros(len(index.rewards), dtype=torch.float64, device=self.device)
        if self.is_last_stage:
            for micro_batch in chain.from_iterable(mini_batches):
                packed = micro_batch.packed
                kl = divergence(
                    self.section.kl, micro_batch.old_logprobs, micro_batch.reference_logprobs
                )
                sums = segment_sum(kl.double(), packed.sequence_index, len(packed.members))
                members = torch.tensor(packed.members, dtype=torch.long, device=self.device)
                penalties.index_add_(0, members, sums)
            dist.all_reduce(penalties, group=self.data_group)
        if self.pipeline_group.size() > 1:
            last = dist.get_process_group_ranks(self.pipeline_group)[-1]
            dist.broadcast(penalties, src=last, group=self.pipeline_group)
        assert self.section.kl_coefficient is not None
        rewards = index.rewards - self.section.kl_coefficient * penalties.cpu()
        groups = torch.tensor(index.groups)
        return self.objective.advantages.of_sequences(rewards, groups).to(self.device)

    def train(
        self, mini_batch: MiniBatch, micro_batches: Sequence[MicroBatch], advantages: Tensor
    ) -> None:
        """One optimizer update. `advantages`: [num_sequences] of the whole step."""
        is_first = not self._updates

        def loss(
            micro_batch: MicroBatch, logprobs: Tensor, entropies: Tensor
        ) -> tuple[Tensor, LossOutputs]:
            packed, old = micro_batch.packed, micro_batch.old_logprobs
            inputs = LossInputs(
                logprobs=logprobs,
                old_logprobs=logprobs.detach() if old is None else old,
                mask=torch.ones_like(logprobs.detach()),
                sequence_index=packed.sequence_index,
                advantages=advantages[list(packed.members)],
                sequence_lengths=packed.response_lengths.float(),
                global_num_sequences=mini_batch.num_sequences,
                global_num_tokens=mini_batch.num_response_tokens,
                sum_over_shards=self.sum_over_shards,
                is_primary_shard=self.cp_group.rank() == 0,
                entropy=entropies,
                token_advantages=micro_batch.token_advantages,
                rollout_logprobs=micro_batch.rollout_logprobs,
                reference_logprobs=micro_batch.reference_logprobs,
            )
            outputs = self.objective(inputs)
            if is_first:
                # The policy is still the one that sampled: what its log-probs differ by from the
                # engine's is mismatch and noise, not learning.
                self._measure_mismatch(inputs)
            return outputs.loss, outputs

        zero_gradients(self.policy.chunks, self.trainer.optimizer)
        with self.replay.training_pass(micro_batches):
            for outputs in forward_backward(
                self.policy, micro_batches, loss, mini_batch.num_micro_batches
            ):
                self._metrics.add_means(outputs.means)
                self._metrics.add_values(outputs.values)
        self._updates.append(self.trainer.update())

    def reduce_metrics(self) -> dict[str, float]:
        """The metrics of the step's mini-batches, the same on every rank. Every rank calls it."""
        reduced = self._metrics.reduce(self.data_group) if self.is_last_stage else None
        metrics = self.objective.complete(share_with_all_stages(reduced, self.pipeline_group))
        metrics["ratio/noise_floor"] = metrics.pop("ratio/noise_floor_squared") ** 0.5
        norms, rates = zip(*self._updates)
        metrics["grad_norm"], metrics["lr"] = sum(norms) / len(norms), rates[-1]
        return metrics | self.replay.metrics()

    def sum_over_shards(self, values: Tensor) -> Tensor:
        """Sum over the ranks that share the micro-batch's sequences."""
        if self.cp_group.size() > 1:
            dist.all_reduce(values, group=self.cp_group)
        return values

    def _record(self, micro_batches: Sequence[MicroBatch], name: str) -> None:
        """Keep the log-probs of a forward pass with the present weights under `name`."""
        if not micro_batches:
            return
        found = response_logprobs(self.policy, micro_batches)  # empty but on the last stage
        for micro_batch, (logprobs, _) in zip(micro_batches, found):
            setattr(micro_batch, name, logprobs)

    def _measure_mismatch(self, inputs: LossInputs) -> None:
        trained, rollout = inputs.logprobs.detach(), inputs.rollout_logprobs
        means, largest = mismatch_metrics(trained, rollout, inputs.mask)
        self._metrics.add_means(means)
        self._metrics.add_maximum("mismatch/max", largest)
        # The spread of log s that the engine's log-probs alone would give: a clip range inside
        # it clips noise.
        sums = segment_sum(
            (trained - rollout).double(), inputs.sequence_index, len(inputs.advantages)
        )
        logs = inputs.sum_over_shards(sums) / inputs.sequence_lengths.clamp(min=1)
        if not inputs.is_primary_shard:
            logs = logs[:0]
        count = logs.new_tensor(float(len(logs)))
        squared = {"ratio/noise_floor_squared": torch.stack([(logs**2).sum(), count])}
        self._metrics.add_means(squared)


def learning_rates(config: Config) -> Schedule:
    """The learning rate of all updates of a run's RL steps. The configuration counts steps, the
    schedule counts optimizer updates."""
    optimizer, updates_per_step = config.optimizer, config.objective.mini_batches
    return Schedule(
        peak=optimizer.learning_rate,
        floor=optimizer.min_learning_rate,
        warmup=optimizer.warmup_steps * updates_per_step,
        total=config.training.steps * updates_per_step,
        decay=optimizer.decay,
    )


class PhaseTimer:
    """Seconds of a step's phases, as metrics perf/PHASE_seconds."""

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[str, float] = {}
        self._device = device

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        self.seconds[f"perf/{phase}_seconds"] = time.perf_counter() - start
