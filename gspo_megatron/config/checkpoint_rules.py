"""What the section `checkpoint` asks of the rest of a configuration."""

from __future__ import annotations

import math
from collections.abc import Iterator

from gspo_megatron.config.problems import problem
from gspo_megatron.config.schema import Config


def checkpoint_problems(config: Config) -> Iterator[str]:
    """What keeps a run from being saved, or its best checkpoints from being known."""
    section, training = config.checkpoint, config.training
    if section.interval:
        yield from _optimizers_that_cannot_be_saved(config)
    by_evaluation = section.best_metric.startswith("evaluation/")
    if not (section.keep_best and by_evaluation):
        return
    evaluated, saved, steps = training.evaluation_interval, section.interval, training.steps
    if evaluated == 0:
        yield problem(
            "checkpoint.keep_best",
            section.keep_best,
            f"no checkpoint before the last has {section.best_metric}; legal: 0, or set "
            "training.evaluation_interval",
        )
    # Of a stage whose steps are not known yet, nothing can be said.
    elif saved and steps is not None and math.lcm(evaluated, saved) >= steps:
        yield problem(
            "checkpoint.keep_best",
            section.keep_best,
            f"no step before the last is both saved (checkpoint.interval = {saved}) and evaluated "
            f"(training.evaluation_interval = {evaluated}), as {section.best_metric} needs; legal: "
            f"0, or intervals with a common multiple below training.steps = {steps}",
        )


def _optimizers_that_cannot_be_saved(config: Config) -> Iterator[str]:
    """Checkpoints hold the moments of Megatron's distributed Adam, by parameter."""
    optimizer, ddp = config.optimizer.megatron, config.parallel.ddp
    for key, value, legal in (
        ("optimizer.megatron.optimizer", optimizer.get("optimizer", "adam"), "adam"),
        ("parallel.ddp.use_distributed_optimizer", ddp.get("use_distributed_optimizer"), True),
    ):
        if value not in (None, legal):
            legal = str(legal).lower()
            yield problem(
                key, value, f"its state cannot be saved; legal: {legal}, or checkpoint.interval = 0"
            )
