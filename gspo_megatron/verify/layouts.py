"""The layouts to compare, and one update on one of them, in processes of its own."""

from __future__ import annotations

import math
import os
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gspo_megatron.config import (
    Config,
    Layout,
    apply_layout,
    check_config,
    resolve_parallel,
)
from gspo_megatron.errors import ConfigError, UserError
from gspo_megatron.platform.groups import start_processes, stop_processes
from gspo_megatron.rl.dumps import Dump
from gspo_megatron.verify.parity import Cut, run_dumped_step, run_update
from gspo_megatron.verify.synthetic import synthetic_batch

_TOKEN_BUDGET = 64  # of a synthetic micro-batch: small, so that every replica has several


@dataclass(frozen=True)
class Task:
    """One update to compute: written to a file for the ranks that compute it."""

    config: Config  # on the layout of these ranks
    vocab_size: int
    cut: Cut
    dump: Dump | None = None  # None: a synthetic batch
    checkpoint: Path | None = None  # see run_dumped_step, as the two below
    optimizer: bool = False
    updates: bool = False


def run_task(path: Path) -> None:
    """Compute the task in this file; every rank calls it. Rank 0 writes the StepResult beside it,
    to the path of `result_path`."""
    task: Task = pickle.loads(path.read_bytes())
    ranks = start_processes()
    if task.dump is None:
        batch = synthetic_batch(task.config.objective, task.vocab_size)
        result = run_update(task.config, task.vocab_size, batch, task.cut)
    else:
        result = run_dumped_step(
            task.config,
            task.vocab_size,
            task.dump,
            task.checkpoint,
            task.cut,
            optimizer=task.optimizer,
            updates=task.updates,
        )
    if ranks.is_main:
        result_path(path).write_bytes(pickle.dumps(result))
    stop_processes()


def result_path(task: Path) -> Path:
    """The file with the result of the task in another file."""
    return task.with_suffix(".result")


def check_layouts(config: Config, layouts: Sequence[Layout]) -> None:
    """Raise ConfigError with every reason why a layout does not fit the configuration."""
    problems = []
    for layout in layouts:
        try:
            check_config(apply_layout(config, layout), layout.world_size)
        except ConfigError as error:
            problems += [f"layout {layout}: {text}" for text in error.problems]
    if problems:
        raise ConfigError(problems)


def usual_layouts(config: Config, most_ranks: int) -> list[Layout]:
    """The configuration's own layout, and two of each kind of parallelism that fits the model.

    Raises UserError where its own layout takes more than `most_ranks` ranks and more than the
    machine has cores.
    """
    own = config.layout()
    if own.world_size > max(most_ranks, os.cpu_count() or 1):
        raise UserError(
            f"layout {own}: takes {own.world_size} ranks, which is much for one machine; name "
            "the layouts to compare, as in --layouts tp=2 pp=2,ep=2"
        )
    found = [] if own.world_size == 1 else [own]
    for text in ("dp=2", "tp=2", "pp=2", "ep=2", "cp=2"):
        layout = Layout.parse(text)
        try:
            check_layouts(config, [layout])
        except ConfigError:
            continue
        if layout not in found:
            found.append(layout)
    return found


def common_cut(config: Config, layouts: Sequence[Layout], *, dumped: bool) -> Cut:
    """Micro-batches that every layout can run alike. (The routers' auxiliary losses depend on the
    content of a micro-batch.)"""
    replicas, multiple = 1, 1
    for layout in layouts:
        parallel = resolve_parallel(apply_layout(config, layout), layout.world_size)
        replicas = math.lcm(replicas, parallel.data_parallel_size)
        if layout.vpp:
            multiple = math.lcm(multiple, layout.pp)
    budget = config.training.micro_batch_tokens if dumped else _TOKEN_BUDGET
    return Cut(replicas, budget, multiple)
