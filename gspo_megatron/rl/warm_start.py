"""Supervised warm start: a few steps on prompt and answer, so that rewards start above zero."""

from __future__ import annotations

import math
import time

import numpy as np

from gspo_megatron.data.examples import Example
from gspo_megatron.data.loader import PromptLoader
from gspo_megatron.data.tokenizers import Tokenizer
from gspo_megatron.models.optimizer import Schedule, build_trainer
from gspo_megatron.observe.records import WARM_START
from gspo_megatron.rl.components import Job, held_out
from gspo_megatron.supervised.batches import SupervisedBatchBuilder
from gspo_megatron.supervised.loop import SupervisedUpdater
from gspo_megatron.types import Prompt

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
    updater = SupervisedUpdater(job.policy, trainer)
    batches = SupervisedBatchBuilder(job.policy, job.builder, config.training.micro_batch_tokens)
    examples = [_example(prompt, job.inputs.tokenizer) for prompt in job.inputs.train]
    loader = PromptLoader(len(examples), section.batch_size, config.training.seed, shuffle=True)
    done = job.checkpoints.restore(WARM_START, trainer, loader)
    target = section.target_accuracy or math.inf
    with job.record.progress(section.steps, "warm start (supervised)", done) as progress:
        for step in range(done + 1, section.steps + 1):
            start = time.perf_counter()
            metrics = updater.update(batches.build([examples[n] for n in loader.next()]))
            metrics["perf/step_seconds"] = time.perf_counter() - start
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


def _example(prompt: Prompt, tokenizer: Tokenizer) -> Example:
    """The answer with its end of sequence is learned, the prompt is not."""
    answer = [*tokenizer.encode(prompt.answer), tokenizer.eos_id]
    token_ids = np.array([*prompt.token_ids, *answer], np.int32)
    return Example(token_ids, np.arange(len(token_ids)) >= len(prompt.token_ids), prompt.source)
