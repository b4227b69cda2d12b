"""Supervised training: the loop for pre-training, fine-tuning and preference models, and the
updates for pre-training and fine-tuning. The loss of these updates is the mean negative log-prob of
all learned tokens in a batch."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gspo_megatron.batching.micro_batches import MicroBatch, forward_backward, response_logprobs
from gspo_megatron.checkpoint.manager import Checkpoints
from gspo_megatron.config.stages import FineTuningConfig, PreferenceConfig, PretrainingConfig
from gspo_megatron.data.preferences import PreferenceData
from gspo_megatron.models.build import Policy
from gspo_megatron.models.optimizer import Schedule, Trainer, build_trainer, zero_gradients
from gspo_megatron.observe.run_logger import RunLogger
from gspo_megatron.platform.devices import peak_memory_bytes
from gspo_megatron.platform.groups import data_parallel_group
from gspo_megatron.platform.reduce_metrics import StepMetrics, from_last_stage, mean_pair
from gspo_megatron.supervised.batches import FineTuningBatches, SupervisedBatch
from gspo_megatron.supervised.preferences import PreferenceBatches, PreferenceUpdater
from gspo_megatron.supervised.pretraining import PretrainingBatches

Batches = FineTuningBatches | PretrainingBatches | PreferenceBatches


class SupervisedUpdater:
    """Does optimizer updates, and computes the loss of evaluation batches."""

    def __init__(self, policy: Policy, trainer: Trainer) -> None:
        self.policy, self.trainer = policy, trainer
        self.device = torch.device(torch.cuda.current_device())
        self.data_group = data_parallel_group()

    def update(self, batch: SupervisedBatch) -> dict[str, float]:
        """Do one update. Returns its metrics, which are the same on every rank."""
        metrics = StepMetrics(self.device)

        def loss(_: MicroBatch, logprobs: Tensor, entropies: Tensor) -> tuple[Tensor, dict]:
            values = {"loss": -logprobs, "policy/entropy": entropies}
            means = {name: mean_pair(each) for name, each in values.items()}
            # Without tokens, the loss is 0 and has gradient 0, so every rank can run backward.
            return -logprobs.sum() / max(batch.num_learned, 1), means

        zero_gradients(self.policy.chunks, self.trainer.optimizer)
        for means in forward_backward(
            self.policy, batch.micro_batches, loss, batch.num_micro_batches
        ):
            metrics.add_means(means)
        norm, rate = self.trainer.update()
        reduced = from_last_stage(lambda: metrics.reduce(self.data_group))
        return reduced | {"grad_norm": norm, "lr": rate}

    def evaluate(self, batches: Iterable[SupervisedBatch]) -> dict[str, float]:
        """Return evaluation/logprob, the mean over all learned tokens of all batches, and
        evaluation/loss, which is -evaluation/logprob. The result is empty without batches."""
        metrics, batch = StepMetrics(self.device), None
        for batch in batches:
            for logprobs, _ in response_logprobs(self.policy, batch.micro_batches):
                values = {"evaluation/loss": -logprobs, "evaluation/logprob": logprobs}
                metrics.add_means({name: mean_pair(each) for name, each in values.items()})
        if batch is None:
            return {}
        return from_last_stage(lambda: metrics.reduce(self.data_group))


@dataclass
class SupervisedLoop:
    """Runs the steps of a stage, with evaluations before, between and after them."""

    config: FineTuningConfig | PretrainingConfig | PreferenceConfig  # training.steps is known
    policy: Policy
    batches: Batches
    logger: RunLogger
    checkpoints: Checkpoints

    def run(self) -> None:
        """Run all steps that are left after the checkpoint.

        If the run is asked to stop, saves it and raises StopRun."""
        config, logger, batches, phase = self.config, self.logger, self.batches, self.config.phase
        steps, interval = config.training.steps, config.training.evaluation_interval
        assert steps is not None, "with_steps comes first"
        trainer = build_trainer(self.policy, config.optimizer, Schedule.of(config.optimizer, steps))
        updater = self._updater(trainer)
        start = self.checkpoints.restore(trainer, batches)  # the checkpoint's step, or 0
        with logger.progress(steps, TITLES[phase], start) as progress:
            before = updater.evaluate(batches.evaluation()) if start == 0 else {}
            if before:
                logger.write(phase, 0, before)
                progress.note(f"held-out loss before: {before['evaluation/loss']:.4f}")
            progress.begin_steps()
            for step in range(start + 1, steps + 1):
                metrics = timed_step(updater, batches)
                is_last = step == steps
                if is_last or (interval and step % interval == 0):
                    metrics |= updater.evaluate(batches.evaluation())
                logger.write(phase, step, metrics)
                progress.update(step, metrics)
                if is_last and "evaluation/loss" in metrics:
                    progress.note(f"held-out loss: {metrics['evaluation/loss']:.4f}")
                self.checkpoints.end_of_step(step, metrics, is_last=is_last)

    def _updater(self, trainer: Trainer) -> Any:
        """Return the object that does the updates and evaluations of the stage."""
        if isinstance(self.batches, PreferenceBatches):
            assert isinstance(self.config, PreferenceConfig)
            data = self.batches.evaluation_data
            assert data is None or isinstance(data, PreferenceData)
            return PreferenceUpdater(self.policy, trainer, self.config.preference, data)
        return SupervisedUpdater(self.policy, trainer)


def timed_step(updater: Any, batches: Batches) -> dict[str, float]:
    """Do one update. Returns its metrics; only the times differ between ranks."""
    start = time.perf_counter()
    batch = batches.next()
    metrics = updater.update(batch)
    seconds = time.perf_counter() - start
    return metrics | {
        **batch.counts(),
        "perf/step_seconds": seconds,
        "perf/tokens_per_second": batch.num_tokens / seconds,
        "perf/peak_memory_bytes": peak_memory_bytes(),
    }


TITLES = {
    "pretrain": "pre-training",
    "sft": "supervised fine-tuning",
    "reward_model": "preference model",
}
