"""Supervised training: the loss is the mean negative log-prob of all learned tokens of a batch."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from gspo_megatron.batching.micro_batches import MicroBatch, forward_backward, response_logprobs
from gspo_megatron.checkpoint.manager import Checkpoints
from gspo_megatron.config.stages import StageConfig
from gspo_megatron.models.build import Policy
from gspo_megatron.models.optimizer import Schedule, Trainer, build_trainer, zero_gradients
from gspo_megatron.observe.run_logger import RunLogger
from gspo_megatron.platform.devices import peak_memory_bytes
from gspo_megatron.platform.reduce_metrics import StepMetrics, share_with_all_stages
from gspo_megatron.supervised.batches import FineTuningBatches, SupervisedBatch
from gspo_megatron.supervised.pretraining import PretrainingBatches

Batches = FineTuningBatches | PretrainingBatches


class SupervisedUpdater:
    """Optimizer updates, and the loss of evaluation batches."""

    def __init__(self, policy: Policy, trainer: Trainer) -> None:
        self.policy, self.trainer = policy, trainer
        self.device = torch.device(torch.cuda.current_device())
        self.data_group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        self.pipeline_group = parallel_state.get_pipeline_model_parallel_group()

    def update(self, batch: SupervisedBatch) -> dict[str, float]:
        """One update. Returns its metrics, the same on every rank."""
        metrics = StepMetrics(self.device)

        def loss(_: MicroBatch, logprobs: Tensor, entropies: Tensor) -> tuple[Tensor, dict]:
            means = _means(logprobs, {"loss": -logprobs, "policy/entropy": entropies})
            # Without tokens the loss is zero; its gradient of zeros lets every rank run backward.
            return -logprobs.sum() / max(batch.num_learned, 1), means

        zero_gradients(self.policy.chunks, self.trainer.optimizer)
        for means in forward_backward(
            self.policy, batch.micro_batches, loss, batch.num_micro_batches
        ):
            metrics.add_means(means)
        norm, rate = self.trainer.update()
        return self._reduce(metrics) | {"grad_norm": norm, "lr": rate}

    def evaluate(self, batches: Iterable[SupervisedBatch]) -> dict[str, float]:
        """evaluation/logprob, the mean over all learned tokens of all batches, and evaluation/loss,
        which is -evaluation/logprob; nothing without batches."""
        metrics, is_empty = StepMetrics(self.device), True
        for batch in batches:
            is_empty = False
            for logprobs, _ in response_logprobs(self.policy, batch.micro_batches):
                values = {"evaluation/loss": -logprobs, "evaluation/logprob": logprobs}
                metrics.add_means(_means(logprobs, values))
        return {} if is_empty else self._reduce(metrics)

    def _reduce(self, metrics: StepMetrics) -> dict[str, float]:
        is_last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        reduced = metrics.reduce(self.data_group) if is_last else None
        return share_with_all_stages(reduced, self.pipeline_group)


def _means(logprobs: Tensor, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """[sum, count] of each value, in float64 because there may be millions of tokens."""
    count = torch.tensor(float(logprobs.numel()), dtype=torch.float64, device=logprobs.device)
    return {
        name: torch.stack([value.detach().double().sum(), count]) for name, value in values.items()
    }


@dataclass
class StageComponents:
    """The parts of a stage, which `supervised.run` builds."""

    config: StageConfig  # training.steps is known
    policy: Policy
    batches: Batches
    record: RunLogger
    checkpoints: Checkpoints
    hf: Any  # config.json of the Hugging Face model that the weights go back to, or None


class SupervisedLoop:
    """The steps of a stage, with evaluations before, between and after them."""

    def __init__(self, parts: StageComponents) -> None:
        """Continues from the run's checkpoint if there is one."""
        self.parts, config = parts, parts.config
        self.phase, self.steps = config.phase, config.training.steps
        self.trainer = build_trainer(parts.policy, config.optimizer, learning_rates(config))
        self.updater = SupervisedUpdater(parts.policy, self.trainer)
        self.done = parts.checkpoints.restore(self.phase, self.trainer, parts.batches)

    def run(self) -> None:
        """All steps that are left. Raises StopRun if the run was told to stop; then it is saved."""
        record, interval = self.parts.record, self.parts.config.training.evaluation_interval
        with record.progress(self.steps, TITLES[self.phase], self.done) as progress:
            if self.done == 0:
                before = self.evaluate()
                if before:
                    record.write(self.phase, 0, before)
                    progress.note(f"held-out loss before: {before['evaluation/loss']:.4f}")
            for step in range(self.done + 1, self.steps + 1):
                metrics = self.step()
                is_last = step == self.steps
                if is_last or (interval and step % interval == 0):
                    metrics |= self.evaluate()
                record.write(self.phase, step, metrics)
                progress.update(step, metrics)
                if is_last and "evaluation/loss" in metrics:
                    progress.note(f"held-out loss: {metrics['evaluation/loss']:.4f}")
                self.parts.checkpoints.end_of_step(
                    self.phase, step, self.trainer, self.parts.batches, metrics, is_last=is_last
                )

    def step(self) -> dict[str, float]:
        """One update. Returns its metrics, the same on every rank except for the times."""
        start = time.perf_counter()
        batch = self.parts.batches.next()
        metrics = self.updater.update(batch)
        seconds = time.perf_counter() - start
        return metrics | {
            "batch/tokens": batch.num_tokens,
            "batch/learned_tokens": batch.num_learned,
            "perf/step_seconds": seconds,
            "perf/tokens_per_second": batch.num_tokens / seconds,
            "perf/peak_memory_bytes": peak_memory_bytes(),
        }

    def evaluate(self) -> dict[str, float]:
        """The loss on the evaluation data; nothing without such data."""
        return self.updater.evaluate(self.parts.batches.evaluation())


TITLES = {"pretrain": "pre-training", "sft": "supervised fine-tuning"}


def learning_rates(config: StageConfig) -> Schedule:
    """The learning rate of all updates of a stage."""
    optimizer = config.optimizer
    return Schedule(
        peak=optimizer.learning_rate,
        floor=optimizer.min_learning_rate,
        warmup=optimizer.warmup_steps,
        total=config.training.steps,
        decay=optimizer.decay,
        wsd_steps=optimizer.wsd_steps,
        wsd_decay=optimizer.wsd_decay,
    )
