"""Supervised steps: the mean negative log-prob of all learned tokens of a batch, on any layout."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

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


@dataclass
class SupervisedBatch:
    """What one optimizer update learns from."""

    micro_batches: list[MicroBatch]  # of this rank
    num_micro_batches: int  # of all ranks, the empty ones left out
    num_learned: int  # tokens that the loss counts, of all ranks
    num_tokens: int  # all tokens, of all ranks


class Batches(Protocol):
    """A stage's data, the same on every layout; all ranks move on together."""

    def next(self) -> SupervisedBatch:
        """The batch of the next step."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Where the next batch begins, fit for JSON."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken. Raises DataError where that is no place in these data."""
        ...

    def evaluation(self) -> Iterable[SupervisedBatch]:
        """All held-out batches, the same at each call; none without such data."""
        ...


class SupervisedUpdater:
    """Optimizer updates on batches, and the loss of batches that are not learned."""

    def __init__(self, policy: Policy, trainer: Trainer) -> None:
        self.policy, self.trainer = policy, trainer
        self.device = torch.device(torch.cuda.current_device())
        self.data_group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        self.pipeline_group = parallel_state.get_pipeline_model_parallel_group()

    def update(self, batch: SupervisedBatch) -> dict[str, float]:
        """One update. Returns its figures, the same on every rank."""
        figures = StepMetrics(self.device)

        def loss(_: MicroBatch, logprobs: Tensor, entropies: Tensor) -> tuple[Tensor, dict]:
            means = _means(logprobs, {"loss": -logprobs, "policy/entropy": entropies})
            # without tokens, zero with a gradient of zeros: every rank runs its backward pass
            return -logprobs.sum() / max(batch.num_learned, 1), means

        zero_gradients(self.policy.chunks, self.trainer.optimizer)
        for means in forward_backward(
            self.policy, batch.micro_batches, loss, batch.num_micro_batches
        ):
            figures.add_means(means)
        norm, rate = self.trainer.update()
        return self._reduced(figures) | {"grad_norm": norm, "lr": rate}

    def evaluate(self, batches: Iterable[SupervisedBatch]) -> dict[str, float]:
        """evaluation/loss, the mean over all learned tokens of all batches, and evaluation/logprob,
        the same with its sign turned; nothing without batches."""
        figures, is_empty = StepMetrics(self.device), True
        for batch in batches:
            is_empty = False
            for logprobs, _ in response_logprobs(self.policy, batch.micro_batches):
                means = _means(
                    logprobs, {"evaluation/loss": -logprobs, "evaluation/logprob": logprobs}
                )
                figures.add_means(means)
        return {} if is_empty else self._reduced(figures)

    def _reduced(self, figures: StepMetrics) -> dict[str, float]:
        is_last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        reduced = figures.reduce(self.data_group) if is_last else None
        return share_with_all_stages(reduced, self.pipeline_group)


def _means(logprobs: Tensor, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Numerators and the one denominator, in float64: sums over millions of tokens."""
    count = torch.tensor(float(logprobs.numel()), dtype=torch.float64, device=logprobs.device)
    return {
        name: torch.stack([value.detach().double().sum(), count]) for name, value in values.items()
    }


@dataclass
class StageJob:
    """A stage's parts, as `train.supervised_run` puts them together."""

    config: StageConfig  # training.steps is known
    policy: Policy
    batches: Batches
    record: RunLogger
    checkpoints: Checkpoints


class SupervisedLoop:
    """Steps of learning and writing down, with evaluations before, between and after."""

    def __init__(self, job: StageJob) -> None:
        """Goes on where the run's checkpoint was taken."""
        self.job, self.config = job, job.config
        self.phase, self.steps = job.config.phase, job.config.training.steps
        trainer = build_trainer(job.policy, job.config.optimizer, learning_rates(job.config))
        self.trainer = trainer
        self.updater = SupervisedUpdater(job.policy, trainer)
        self.done = job.checkpoints.restore(self.phase, trainer, job.batches)

    def run(self) -> None:
        """The steps that are not done yet. Raises StopRun where the run was told to stop, and is
        saved."""
        record, interval = self.job.record, self.config.training.evaluation_interval
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
                self.job.checkpoints.end_of_step(
                    self.phase, step, self.trainer, self.job.batches, metrics, is_last=is_last
                )

    def step(self) -> dict[str, float]:
        """One update. Returns its metrics, the same on every rank but for the times."""
        start = time.perf_counter()
        batch = self.job.batches.next()
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
        """The loss on held-out data; nothing without any."""
        return self.updater.evaluate(self.job.batches.evaluation())


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
