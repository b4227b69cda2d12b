"""The policy update of one RL step: old log-probs, then one optimizer update a mini-batch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from gspo_megatron.config.schema import ObjectiveSection
from gspo_megatron.models.build import Policy
from gspo_megatron.models.optimizer import Trainer, zero_gradients
from gspo_megatron.objectives import Objective, get_objective
from gspo_megatron.ops.segments import segment_sum
from gspo_megatron.train.exchange import Sequences, StepIndex
from gspo_megatron.train.metrics import StepFigures, mismatch_figures, share_with_all_stages
from gspo_megatron.train.plan import MiniBatch
from gspo_megatron.train.schedule import (
    MicroBatch,
    MicroBatchBuilder,
    forward_backward,
    response_logprobs,
)
from gspo_megatron.types import LossInputs, LossOutputs


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
        section: ObjectiveSection,
    ) -> None:
        self.policy, self.trainer, self.builder = policy, trainer, builder
        self.objective: Objective = get_objective(section.name)
        self.clip = {"clip_low": section.clip_low, "clip_high": section.clip_high}
        self.recompute_old = section.old_logprobs == "recompute"
        self.device = builder.device
        self.cp_group = parallel_state.get_context_parallel_group()
        self.data_group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        self.pipeline_group = parallel_state.get_pipeline_model_parallel_group()
        self.is_last_stage = parallel_state.is_pipeline_last_stage(ignore_virtual=True)

    def update(
        self, sequences: Sequences, index: StepIndex, mini_batches: Sequence[MiniBatch]
    ) -> Update:
        """One RL step's worth of optimizer updates on this rank's `sequences`."""
        figures = StepFigures(self.device)
        start = time.perf_counter()
        batches = self.builder.build_step(mini_batches, sequences, index)
        sampled = [[sequences.logprobs[m.packed.response_index] for m in b] for b in batches]
        old = self._old_logprobs(batches) if self.recompute_old else sampled
        logprob_seconds = self._elapsed(start)

        start = time.perf_counter()
        norms, rates = [], []
        for number, (plan, batch) in enumerate(zip(mini_batches, batches, strict=True)):
            # Before the first update the policy is still the one that sampled: what its log-probs
            # differ by from the engine's is mismatch and noise, not learning.
            measure = figures if number == 0 else None
            loss = _ObjectiveLoss(
                self, plan, batch, old[number], sampled[number], sequences, measure
            )
            zero_gradients(self.policy.chunks, self.trainer.optimizer)
            for outputs in forward_backward(self.policy, batch, loss, plan.num_micro_batches):
                figures.add_means(outputs.means)
                figures.add_values(outputs.values)
            norm, rate = self.trainer.update()
            norms.append(norm)
            rates.append(rate)
        train_seconds = self._elapsed(start)

        reduced = figures.reduce(self.data_group) if self.is_last_stage else None
        metrics = share_with_all_stages(reduced, self.pipeline_group)
        metrics["grad_norm"] = sum(norms) / len(norms)
        metrics["lr"] = rates[-1]
        seconds = {"logprob": logprob_seconds, "train": train_seconds}
        return Update(metrics, seconds)

    def _old_logprobs(self, batches: Sequence[Sequence[MicroBatch]]) -> list[list[Tensor | None]]:
        """Log-probs under the policy at the start of the step. Those of the first mini-batch are
        what its training pass computes (None here): no update lies between."""
        later = [m for batch in batches[1:] for m in batch]
        recomputed = iter(response_logprobs(self.policy, later) if later else ())
        first: list[list[Tensor | None]] = [[None] * len(batches[0])]
        if not self.is_last_stage:
            return first + [[None] * len(batch) for batch in batches[1:]]
        return first + [[next(recomputed)[0] for _ in batch] for batch in batches[1:]]

    def sum_over_shards(self, values: Tensor) -> Tensor:
        """Sum over the ranks that share the micro-batch's sequences."""
        if self.cp_group.size() > 1:
            dist.all_reduce(values, group=self.cp_group)
        return values

    def _elapsed(self, start: float) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start


class _ObjectiveLoss:
    """The loss callback of one mini-batch: pairs each micro-batch with its old log-probs."""

    def __init__(
        self,
        updater: PolicyUpdater,
        plan: MiniBatch,
        batch: Sequence[MicroBatch],
        old: Sequence[Tensor | None],
        sampled: Sequence[Tensor],
        sequences: Sequences,
        measure: StepFigures | None,
    ) -> None:
        self.updater, self.plan, self.measure = updater, plan, measure
        self.advantages = sequences.advantages
        self.anchors = {id(m): (o, s) for m, o, s in zip(batch, old, sampled, strict=True)}

    def __call__(
        self, micro_batch: MicroBatch, logprobs: Tensor, entropies: Tensor
    ) -> tuple[Tensor, LossOutputs]:
        packed = micro_batch.packed
        old, sampled = self.anchors[id(micro_batch)]
        old = logprobs.detach() if old is None else old
        advantages = [self.advantages[n] for n in packed.members]
        inputs = LossInputs(
            logprobs=logprobs,
            old_logprobs=old,
            mask=torch.ones_like(old),
            sequence_index=packed.sequence_index,
            advantages=torch.tensor(advantages, dtype=torch.float32, device=old.device),
            sequence_lengths=packed.response_lengths.float(),
            global_num_sequences=self.plan.num_sequences,
            global_num_tokens=self.plan.num_response_tokens,
            sum_over_shards=self.updater.sum_over_shards,
            is_primary_shard=self.updater.cp_group.rank() == 0,
            entropy=entropies,
        )
        outputs = self.updater.objective(inputs, **self.updater.clip)
        if self.measure is not None:
            self._measure_mismatch(inputs, sampled)
        return outputs.loss, outputs

    def _measure_mismatch(self, inputs: LossInputs, sampled: Tensor) -> None:
        trained = inputs.logprobs.detach()
        means, largest = mismatch_figures(trained, sampled, inputs.mask)
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
