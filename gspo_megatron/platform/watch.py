"""Watches over a run: a hang ends it, and a Slurm job's end is seen coming in time to save."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from gspo_megatron.config import Config
from gspo_megatron.config.stages import StageConfig
from gspo_megatron.platform.collectives import on_main
from gspo_megatron.platform.groups import Ranks
from gspo_megatron.platform.heartbeat import Heartbeat
from gspo_megatron.platform.slurm import SlurmJob
from gspo_megatron.platform.stop import StopSignals

_LONGEST_WAIT = 60.0  # seconds between two looks at the time left


@contextlib.contextmanager
def watched(
    config: Config | StageConfig, models: Sequence[torch.nn.Module], ranks: Ranks, stop: StopSignals
) -> Iterator[None]:
    """Train inside the context; every rank enters it. The rank is alive while its model runs."""
    job = SlurmJob.of(os.environ)
    if job is not None and ranks.is_main:
        print(f"{job}", file=sys.stderr, flush=True)
    timeout = config.training.hang_timeout_seconds
    heartbeat = Heartbeat(Path(str(config.logging.dir)), ranks.rank, ranks.world_size, timeout)
    on_main(heartbeat.forget_earlier)
    hooks = [model.register_forward_pre_hook(heartbeat.beat) for model in models]
    # A run that cannot be saved gains nothing by stopping early.
    watches = ranks.is_main and config.checkpoint.interval > 0
    margin = config.training.stop_margin_seconds
    try:
        with TimeWatch(stop, margin, job if watches else None), heartbeat:
            yield
    finally:
        for hook in hooks:
            hook.remove()


class TimeWatch:
    """Inside the context, asks for a stop in time for the run to be saved before its job ends.

    A thread looks at the time left, and asks once that is below `margin` seconds plus the time of
    the longest step, with its evaluation and checkpoint: so long it takes until the run can stop.
    """

    def __init__(self, stop: StopSignals, margin: float, job: SlurmJob | None) -> None:
        """No `job`, no watch."""
        self._stop, self._margin, self._job = stop, margin, job
        self._ended = threading.Event()

    def __enter__(self) -> TimeWatch:
        if self._job is not None:
            threading.Thread(target=self._watch, args=(self._job,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def _watch(self, job: SlurmJob) -> None:
        while not self._stop.is_requested:
            left = job.seconds_left()
            needed = self._margin + self._stop.longest_step
            if left is not None and left <= needed:
                text = f"{job}: {left:.0f} s left, of which a stop may take {needed:.0f}: stopping"
                print(text, file=sys.stderr, flush=True)
                self._stop.is_requested = True
                return
            wait = _LONGEST_WAIT if left is None else (left - needed) / 2
            if self._ended.wait(min(_LONGEST_WAIT, max(1.0, wait))):
                return
