"""The policy update of a step: old log-probs, then one optimizer update for each mini-batch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from gspo_megatron.batching.micro_batches import (
    MicroBatch,
    MicroBatchBuilder,
    forward_backward,
    head_outputs,
)
from gspo_megatron.batching.plan import MiniBatch
from gspo_megatron.batching.redistribute import Sequences, StepIndex
from gspo_megatron.config.schema import ObjectiveSection, RoutingSection
from gspo_megatron.models.build import Policy
from gspo_megatron.models.optimizer import Trainer, zero_gradients
from gspo_megatron.models.reference import ReferencePolicy
from gspo_megatron.objectives import Objective
from gspo_megatron.objectives.parts import divergence, segment_sum
from gspo_megatron.platform.groups import data_parallel_group
from gspo_megatron.platform.reduce_metrics import (
    StepMetrics,
    from_last_stage,
    mean_pair,
    mismatch_metrics,
)
from gspo_megatron.rl.distillation import Distillation
from gspo_megatron.routing.replay import RoutingReplay, RoutingReplayOff
from gspo_megatron.types import LossInputs, LossOutputs


class PolicyUpdater:
    """The parts of a policy update; `rl.loop.update_policy` calls them in order."""

    def __init__(
        self,
        policy: Policy,
        trainer: Trainer,
        builder: MicroBatchBuilder,
        objective: Objective,
        section: ObjectiveSection,
        routing: RoutingSection | None = None,
        *,
        recomputes: bool | None = None,
    ) -> None:
        """Copy the policy's current weights as the reference policy, if the objective needs one.
        recomputes: whether to recompute the old log-probs; None: recompute unless
        `objective.old_logprobs` is `rollout`."""
        self.policy, self.trainer, self.builder = policy, trainer, builder
        self.objective, self.section = objective, section
        self.device = builder.device
        self.recomputes = section.old_logprobs != "rollout" if recomputes is None else recomputes
        self.reference = None
        if objective.needs_reference:
            self.reference = ReferencePolicy(policy, offload=section.reference_offload)
        self.penalizes_rewards = self.reference is not None and section.kl_in == "reward"
        self.distillation = Distillation(policy, objective, section)
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
        """Begin a step: build this data-parallel rank's micro-batches of each mini-batch."""
        self._metrics = StepMetrics(self.device)
        self._updates: list[tuple[float, float]] = []  # (gradient norm, learning rate)
        self._learns = any(mini_batch.num_response_tokens for mini_batch in plan)
        mini_batches = self.builder.build_step(plan, sequences, index)
        sequences.routes = None  # now the micro-batches have the routes
        for micro_batch in chain.from_iterable(mini_batches):
            micro_batch.head.entropy_gradient = self.objective.needs_entropy_gradient
        self.replay.start(mini_batches)
        return mini_batches

    def compute_old_logprobs(self, mini_batches: Sequence[Sequence[MicroBatch]]) -> None:
        """Compute log-probs under the old policy, the reference policy and the teacher.

        The first mini-batch needs no separate pass for its old log-probs: no update comes before
        its training pass, which computes the same log-probs.
        """
        everything = list(chain.from_iterable(mini_batches))
        covers_first = self.penalizes_rewards or self.replay.records_all
        covered = everything if covers_first else everything[len(mini_batches[0]) :]
        if self.recomputes or self.replay.records:
            with self.replay.during("old", covered):
                self._store_logprobs(covered, "old_logprobs")
        if not self.recomputes:
            for micro_batch in everything if self.section.old_logprobs == "rollout" else covered:
                micro_batch.old_logprobs = micro_batch.rollout_logprobs
        if self.reference is not None:
            with self.replay.during("reference", everything), self.reference.in_place():
                self._store_logprobs(everything, "reference_logprobs")
        # Nothing is replayed for a teacher: its own routers choose its experts.
        self.distillation.ask_folders(everything)

    def penalized_advantages(
        self, mini_batches: Sequence[Sequence[MicroBatch]], index: StepIndex
    ) -> Tensor:
        """Compute advantages from the rewards minus a KL penalty, [num_sequences] float32.

        The penalty is the divergence from the reference policy, summed over the response's tokens
        inside the mask, times `kl_coefficient`.
        """
        penalties = torch.zeros(len(index.rewards), dtype=torch.float64, device=self.device)
        if self.is_last_stage:
            for micro_batch in chain.from_iterable(mini_batches):
                packed = micro_batch.packed
                old, reference = micro_batch.old_logprobs, micro_batch.reference_logprobs
                assert old is not None and reference is not None, "compute_old_logprobs comes first"
                kl = divergence(self.section.kl, old, reference)
                if micro_batch.mask is not None:
                    kl = kl.where(micro_batch.mask > 0, 0.0)
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
        """Run one optimizer update. advantages: [num_sequences], of the whole step."""
        is_first = not self._updates

        def loss(
            micro_batch: MicroBatch,
            logprobs: Tensor,
            entropies: Tensor,
            of_candidates: Tensor | None = None,
        ) -> tuple[Tensor, LossOutputs]:
            packed, old = micro_batch.packed, micro_batch.old_logprobs
            mask, lengths = micro_batch.mask, micro_batch.masked_lengths
            members = torch.tensor(packed.members, dtype=torch.long)
            inputs = LossInputs(
                logprobs=logprobs,
                old_logprobs=logprobs.detach() if old is None else old,
                mask=torch.ones_like(logprobs.detach()) if mask is None else mask,
                sequence_index=packed.sequence_index,
                advantages=advantages[members.to(self.device, non_blocking=True)],
                sequence_lengths=(packed.response_lengths if lengths is None else lengths).float(),
                global_num_sequences=mini_batch.num_sequences,
                global_num_tokens=mini_batch.num_response_tokens,
                sum_over_shards=self.sum_over_shards,
                is_primary_shard=self.cp_group.rank() == 0,
                entropy=entropies,
                token_advantages=micro_batch.token_advantages,
                rollout_logprobs=micro_batch.rollout_logprobs,
                reference_logprobs=micro_batch.reference_logprobs,
            )
            outputs, of_teacher = self.distillation.outputs(inputs, micro_batch, of_candidates)
            if is_first:
                # The policy has not been updated since it sampled. So these metrics are about the
                # policy that sampled, and a difference between its log-probs and the engine's is
                # mismatch and noise, not learning.
                self._metrics.add_means(of_teacher)
                self._measure_mismatch(inputs)
            return outputs.loss, outputs

        for micro_batch in micro_batches:
            micro_batch.head.candidates = micro_batch.teacher_tokens
        zero_gradients(self.policy.chunks, self.trainer.optimizer)
        with self.replay.during("training", micro_batches):
            for outputs in forward_backward(
                self.policy, micro_batches, loss, mini_batch.num_micro_batches
            ):
                self._metrics.add_means(outputs.means)
                self._metrics.add_values(outputs.values)
        self._updates.append(self.trainer.update())

    def reduce_metrics(self) -> dict[str, float]:
        """Return the metrics of the step's mini-batches, the same on every rank. All ranks call
        this method."""
        reduced = from_last_stage(lambda: self._metrics.reduce(self.data_group))
        metrics = self.objective.complete(reduced)
        if "distill/loss" in metrics and "loss" in metrics:
            metrics["loss"] += self.section.distillation.coefficient * metrics["distill/loss"]
        if "loss" in metrics and not self._learns:
            metrics["loss"] = 0.0  # a NaN, as the mean of nothing, would count as a collapse
        metrics["ratio/noise_floor"] = metrics.pop("ratio/noise_floor_squared") ** 0.5
        norms, rates = zip(*self._updates)
        metrics["grad_norm"], metrics["lr"] = sum(norms) / len(norms), rates[-1]
        return metrics | self.replay.metrics()

    def sum_over_shards(self, values: Tensor) -> Tensor:
        """Sum over the ranks that share the micro-batch's sequences."""
        if self.cp_group.size() > 1:
            dist.all_reduce(values, group=self.cp_group)
        return values

    def _store_logprobs(self, micro_batches: Sequence[MicroBatch], name: str) -> None:
        """Store the log-probs of a forward pass with the current weights in the field `name`."""
        if not micro_batches:
            return
        outputs = head_outputs(self.policy, micro_batches)  # empty except on the last stage
        for micro_batch, output in zip(micro_batches, outputs):
            setattr(micro_batch, name, output[0])

    def _measure_mismatch(self, inputs: LossInputs) -> None:
        trained, rollout = inputs.logprobs.detach(), inputs.rollout_logprobs
        assert rollout is not None, "micro-batches have the rollout's log-probs"
        means, largest = mismatch_metrics(trained, rollout, inputs.mask)
        self._metrics.add_means(means)
        self._metrics.add_maximum("mismatch/max", largest)
        # The spread of the log sequence ratios between trainer and engine. A clip range below this
        # spread clips noise.
        difference = (trained - rollout).double().where(inputs.mask > 0, 0.0)
        sums = segment_sum(difference, inputs.sequence_index, len(inputs.advantages))
        logs = inputs.sum_over_shards(sums) / inputs.sequence_lengths.clamp(min=1)
        logs = logs[(inputs.sequence_lengths > 0) & inputs.is_primary_shard]
        self._metrics.add_means({"ratio/noise_floor_squared": mean_pair(logs**2)})
