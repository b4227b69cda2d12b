"""The policy update of one RL step: old log-probs, then one optimizer update a mini-batch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from gspo_megatron.batching.micro_batches import (
    MicroBatch,
    MicroBatchBuilder,
    forward_backward,
    response_logprobs,
)
from gspo_megatron.batching.plan import MiniBatch
from gspo_megatron.batching.redistribute import Sequences, StepIndex
from gspo_megatron.config.schema import Config, ObjectiveSection, RoutingSection
from gspo_megatron.models.build import Policy
from gspo_megatron.models.optimizer import Schedule, Trainer, zero_gradients
from gspo_megatron.models.reference import ReferencePolicy
from gspo_megatron.objectives import Objective
from gspo_megatron.objectives.parts import divergence, segment_sum
from gspo_megatron.platform.reduce_metrics import (
    StepMetrics,
    mismatch_metrics,
    share_with_all_stages,
)
from gspo_megatron.rl.routing_replay import RoutingReplay
from gspo_megatron.types import LossInputs, LossOutputs


def learning_rates(config: Config) -> Schedule:
    """The learning rate of all updates of a run's RL steps."""
    optimizer, updates_per_step = config.optimizer, config.objective.mini_batches
    return Schedule(
        peak=optimizer.learning_rate,
        floor=optimizer.min_learning_rate,
        warmup=optimizer.warmup_steps * updates_per_step,
        total=config.training.steps * updates_per_step,
        decay=optimizer.decay,
    )


@dataclass
class Update:
    """What a policy update leaves behind, the same on every rank."""

    metrics: dict[str, float]
    seconds: dict[str, float] = field(default_factory=dict)


class PolicyUpdater:
    """Runs the optimizer mini-batches of a step with one objective."""

    def __init__(
        self,
        policy: Policy,
        trainer: Trainer,
        builder: MicroBatchBuilder,
        objective: Objective,
        section: ObjectiveSection,
        routing: RoutingSection | None = None,
    ) -> None:
        """The reference policy, where the objective needs one, is the policy as it is now."""
        self.policy, self.trainer, self.builder = policy, trainer, builder
        self.objective, self.section = objective, section
        self.recompute_old = section.old_logprobs == "recompute"
        self.reference = None
        if objective.needs_reference:
            self.reference = ReferencePolicy(policy, offload=section.reference_offload)
        self.device = builder.device
        self.routes = None
        if routing is not None and (routing.modes or routing.volatility):
            self.routes = RoutingReplay(policy, routing, self.device)
        self.cp_group = parallel_state.get_context_parallel_group()
        self.data_group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        self.pipeline_group = parallel_state.get_pipeline_model_parallel_group()
        self.is_last_stage = parallel_state.is_pipeline_last_stage(ignore_virtual=True)

    def update(
        self, sequences: Sequences, index: StepIndex, mini_batches: Sequence[MiniBatch]
    ) -> Update:
        """One RL step's worth of optimizer updates on this rank's `sequences`."""
        figures = StepMetrics(self.device)
        start = time.perf_counter()
        batches = self.builder.build_step(mini_batches, sequences, index)
        for batch in batches:
            for micro_batch in batch:
                micro_batch.head.entropy_gradient = self.objective.needs_entropy_gradient
        if self.routes is not None:
            self.routes.start(batches, sequences)
        anchors = self._anchors(batches, sequences)
        rewards = index.rewards - self._penalties(anchors, len(index.rewards))
        advantages = self._advantages(rewards, index)
        logprob_seconds = self._elapsed(start)

        start = time.perf_counter()
        norms, rates = [], []
        for number, (plan, batch) in enumerate(zip(mini_batches, batches, strict=True)):
            # Before the first update the policy is still the one that sampled: what its log-probs
            # differ by from the engine's is mismatch and noise, not learning.
            measure = figures if number == 0 else None
            loss = _ObjectiveLoss(self, plan, anchors, advantages, measure)
            zero_gradients(self.policy.chunks, self.trainer.optimizer)
            if self.routes is not None:
                self.routes.set_training_pass(batch)
            for outputs in forward_backward(self.policy, batch, loss, plan.num_micro_batches):
                figures.add_means(outputs.means)
                figures.add_values(outputs.values)
            if self.routes is not None:
                self.routes.finish_training_pass(batch)
            norm, rate = self.trainer.update()
            norms.append(norm)
            rates.append(rate)
        train_seconds = self._elapsed(start)

        reduced = figures.reduce(self.data_group) if self.is_last_stage else None
        metrics = self.objective.complete(share_with_all_stages(reduced, self.pipeline_group))
        metrics["grad_norm"] = sum(norms) / len(norms)
        metrics["lr"] = rates[-1]
        if self.routes is not None:
            metrics |= self.routes.figures()
        seconds = {"logprob": logprob_seconds, "train": train_seconds}
        return Update(metrics, seconds)

    def _anchors(
        self, batches: Sequence[Sequence[MicroBatch]], sequences: Sequences
    ) -> dict[int, Anchors]:
        """What the objective compares the policy to, by the micro-batch's id()."""
        anchors = {}
        for micro_batch in (m for batch in batches for m in batch):
            rows = micro_batch.packed.response_index
            own = sequences.token_advantages
            anchors[id(micro_batch)] = Anchors(
                micro_batch=micro_batch,
                sampled=sequences.logprobs[rows],
                token_advantages=None if own is None else own[rows],
            )
        everything = [m for batch in batches for m in batch]
        self._old_pass(everything, len(batches[0]), anchors)
        if self.reference is not None:
            if self.routes is not None:
                self.routes.set_reference_pass(everything)
            with self.reference.in_place():
                self._record(everything, anchors, "reference")
            if self.routes is not None:
                self.routes.finish_reference_pass(everything)
        return anchors

    def _old_pass(
        self, micro_batches: Sequence[MicroBatch], first: int, anchors: dict[int, Anchors]
    ) -> None:
        """Log-probs under the policy at the start of the step. Those of the first mini-batch, the
        first `first` micro-batches, are what its training pass computes: no update lies between.
        """
        penalises = self.reference is not None and self.section.kl_in == "reward"
        everywhere = penalises or (self.routes is not None and self.routes.records_all)
        wanted = micro_batches if everywhere else micro_batches[first:]
        if self.recompute_old or (self.routes is not None and self.routes.records):
            if self.routes is not None:
                self.routes.set_old_pass(wanted)
            self._record(wanted, anchors, "old")
            if self.routes is not None:
                self.routes.take_old_pass(wanted)
        if not self.recompute_old:
            for anchor in anchors.values():
                anchor.old = anchor.sampled

    def _record(
        self, micro_batches: Sequence[MicroBatch], anchors: dict[int, Anchors], name: str
    ) -> None:
        """The log-probs of a forward pass with the present weights, kept under `name`."""
        if not micro_batches:
            return
        found = response_logprobs(self.policy, micro_batches)  # the last stage's alone
        for micro_batch, (logprobs, _) in zip(micro_batches, found, strict=False):
            setattr(anchors[id(micro_batch)], name, logprobs)

    def _penalties(self, anchors: dict[int, Anchors], count: int) -> Tensor:
        """[num_sequences] float64: what the divergence from the reference takes off each reward,
        its sum over the response's tokens."""
        penalties = torch.zeros(count, dtype=torch.float64, device=self.device)
        if self.reference is None or self.section.kl_in == "loss":
            return penalties.cpu()
        if self.is_last_stage:
            for anchor in anchors.values():
                packed = anchor.micro_batch.packed
                kl = divergence(self.section.kl, anchor.old, anchor.reference).double()
                sums = segment_sum(kl, packed.sequence_index, len(packed.members))
                members = torch.tensor(packed.members, dtype=torch.long, device=self.device)
                penalties.index_add_(0, members, sums)
            dist.all_reduce(penalties, group=self.data_group)
        if self.pipeline_group.size() > 1:
            last = dist.get_process_group_ranks(self.pipeline_group)[-1]
            dist.broadcast(penalties, src=last, group=self.pipeline_group)
        assert self.section.kl_coefficient is not None
        return self.section.kl_coefficient * penalties.cpu()

    def _advantages(self, rewards: Tensor, index: StepIndex) -> Tensor:
        """[num_sequences] float32 on the device, from all sequences' rewards."""
        groups = torch.tensor(index.groups, dtype=torch.long)
        return self.objective.advantages.of_sequences(rewards, groups).to(self.device)

    def sum_over_shards(self, values: Tensor) -> Tensor:
        """Sum over the ranks that share the micro-batch's sequences."""
        if self.cp_group.size() > 1:
            dist.all_reduce(values, group=self.cp_group)
        return values

    def _elapsed(self, start: float) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start


@dataclass
class Anchors:
    """What the policy's log-probs of a micro-batch are held against; [response tokens] each, in the
    order of the micro-batch's rows. `old` and `reference` are known on the last stage only."""

    micro_batch: MicroBatch
    sampled: Tensor
    token_advantages: Tensor | None
    old: Tensor | None = None  # None: the policy's own, of the training pass
    reference: Tensor | None = None


class _ObjectiveLoss:
    """The loss callback of one mini-batch: pairs each micro-batch with its anchors."""

    def __init__(
        self,
        updater: PolicyUpdater,
        plan: MiniBatch,
        anchors: dict[int, Anchors],
        advantages: Tensor,
        measure: StepMetrics | None,
    ) -> None:
        self.updater, self.plan, self.measure = updater, plan, measure
        self.anchors, self.advantages = anchors, advantages

    def __call__(
        self, micro_batch: MicroBatch, logprobs: Tensor, entropies: Tensor
    ) -> tuple[Tensor, LossOutputs]:
        packed = micro_batch.packed
        anchor = self.anchors[id(micro_batch)]
        old = logprobs.detach() if anchor.old is None else anchor.old
        inputs = LossInputs(
            logprobs=logprobs,
            old_logprobs=old,
            mask=torch.ones_like(old),
            sequence_index=packed.sequence_index,
            advantages=self.advantages[list(packed.members)],
            sequence_lengths=packed.response_lengths.float(),
            global_num_sequences=self.plan.num_sequences,
            global_num_tokens=self.plan.num_response_tokens,
            sum_over_shards=self.updater.sum_over_shards,
            is_primary_shard=self.updater.cp_group.rank() == 0,
            entropy=entropies,
            token_advantages=anchor.token_advantages,
            rollout_logprobs=anchor.sampled,
            reference_logprobs=anchor.reference,
        )
        outputs = self.updater.objective(inputs)
        if self.measure is not None:
            self._measure_mismatch(inputs, anchor.sampled)
        return outputs.loss, outputs

    def _measure_mismatch(self, inputs: LossInputs, sampled: Tensor) -> None:
        trained = inputs.logprobs.detach()
        means, largest = mismatch_metrics(trained, sampled, inputs.mask)
        self.measure.add_means(means)
        self.measure.add_maximum("mismatch/max", largest)
        # The spread of log s that the engine's log-probs alone would give: a clip range inside
        # it clips noise.
        sums = segment_sum(
            (trained - sampled).double(), inputs.sequence_index, len(inputs.advantages)
        )
        logs = inputs.sum_over_shards(sums) / inputs.sequence_lengths.clamp(min=1)
        if not inputs.is_primary_shard:
            logs = logs[:0]
        count = logs.new_tensor(float(len(logs)))
        self.measure.add_means({"ratio/noise_floor_squared": torch.stack([(logs**2).sum(), count])})
