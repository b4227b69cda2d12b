"""Supervised warm start: a few steps on prompt and answer, so that rewards start above zero."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence

import torch
from megatron.core import parallel_state
from torch import Tensor

from gspo_megatron.data.loader import PromptLoader
from gspo_megatron.data.packing import BatchShape
from gspo_megatron.models.build import Policy
from gspo_megatron.models.optimizer import Schedule, Trainer, build_trainer, zero_gradients
from gspo_megatron.observe.records import WARM_START
from gspo_megatron.train.job import Job, held_out
from gspo_megatron.train.metrics import StepFigures, share_with_all_stages
from gspo_megatron.train.plan import MiniBatch, plan_step
from gspo_megatron.train.schedule import MicroBatch, MicroBatchBuilder, forward_backward

# Steps between two looks at the held-out accuracy during a warm start that has a target.
LOOK_EVERY = 5


def warm_start(job: Job) -> None:
    """Supervised steps on prompt and answer, with an optimizer of their own; those that are not
    done yet. Raises StopRun where the run was told to stop, and is saved."""
    config = job.config
    section = config.training.warm_start
    if section.steps == 0 or job.checkpoints.is_past(WARM_START):
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
    done = job.checkpoints.restore(WARM_START, trainer, loader)
    target = section.target_accuracy or math.inf
    with job.record.progress(section.steps, "warm start (supervised)", done) as progress:
        for step in range(done + 1, section.steps + 1):
            chosen = loader.next()
            metrics = updater.update(
                [prompts[i].token_ids for i in chosen], [answers[i] for i in chosen]
            )
            if section.target_accuracy and step % LOOK_EVERY == 0:
                metrics |= held_out(job)
            job.record.write(WARM_START, step, metrics)
            progress.update(step, metrics)
            enough = metrics.get("evaluation/accuracy", 0.0) >= target
            if enough:
                progress.note(f"held-out accuracy {metrics['evaluation/accuracy']:.3f}: enough")
            is_last = enough or step == section.steps
            job.checkpoints.end_of_step(WARM_START, step, trainer, loader, metrics, is_last=is_last)
            if is_last:
                return


class SupervisedUpdater:
    """Next-token cross-entropy on the answers: the mean over all answer tokens of a batch."""

    def __init__(
        self, policy: Policy, trainer: Trainer, builder: MicroBatchBuilder, token_budget: int
    ) -> None:
        self.policy, self.trainer, self.builder = policy, trainer, builder
        self.token_budget = token_budget
        self.data_group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        self.pipeline_group = parallel_state.get_pipeline_model_parallel_group()

    def update(
        self, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
    ) -> dict[str, float]:
        """One optimizer update on the whole batch, which every rank passes alike."""
        start = time.perf_counter()
        lengths = [len(p) + len(a) for p, a in zip(prompts, answers, strict=True)]
        plan = plan_step(
            lengths,
            [len(a) for a in answers],
            mini_batches=1,
            data_parallel_size=parallel_state.get_data_parallel_world_size(),
            token_budget=self.token_budget,
            micro_batch_multiple=micro_batch_multiple(self.policy),
            padded=self.builder.padded,
        )[0]
        shape = self.builder.common_shape([plan], lengths)
        batches = list(self._micro_batches(plan, shape, prompts, answers))
        figures = StepFigures(self.builder.device)

        def loss(_: MicroBatch, logprobs: Tensor, entropies: Tensor) -> tuple[Tensor, dict]:
            total = -logprobs.sum()
            count = torch.tensor(float(logprobs.numel()), device=total.device)
            means = {"loss": (total, count), "policy/entropy": (entropies.sum(), count)}
            means = {name: torch.stack(pair).detach() for name, pair in means.items()}
            return total / plan.num_response_tokens, means

        zero_gradients(self.policy.chunks, self.trainer.optimizer)
        for means in forward_backward(self.policy, batches, loss, plan.num_micro_batches):
            figures.add_means(means)
        norm, rate = self.trainer.update()
        is_last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        reduced = figures.reduce(self.data_group) if is_last else None
        metrics = share_with_all_stages(reduced, self.pipeline_group)
        seconds = time.perf_counter() - start
        return metrics | {"grad_norm": norm, "lr": rate, "perf/step_seconds": seconds}

    def _micro_batches(
        self,
        plan: MiniBatch,
        shape: BatchShape | None,
        prompts: Sequence[Sequence[int]],
        answers: Sequence[Sequence[int]],
    ) -> Iterator[MicroBatch]:
        for numbers in plan.of_rank(parallel_state.get_data_parallel_rank()):
            tokens = [torch.tensor([*prompts[n], *answers[n]]) for n in numbers]
            responses = [len(answers[n]) for n in numbers]
            offsets = [0] * len(numbers)
            yield self.builder.build(range(len(numbers)), tokens, responses, offsets, shape)


def micro_batch_multiple(policy: Policy) -> int:
    """Interleaved pipeline schedules want a multiple of the pipeline's size."""
    config = policy.config
    if config.virtual_pipeline_model_parallel_size is None:
        return 1
    return config.pipeline_model_parallel_size
