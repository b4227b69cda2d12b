"""Ends runs early. A signal, or a Slurm job whose time runs out, requests a checkpoint and an
orderly end. A hang ends the run at once.

A scheduler sends SIGTERM or SIGUSR1 some time before it ends a job, and a terminal that is closed
sends SIGHUP. The ranks notice the signal at different moments, so they agree on when to stop: at
the end of a step, or after its rollouts.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from gspo_megatron.config.stages import AnyConfig
from gspo_megatron.errors import tell
from gspo_megatron.observe.environment import output_of
from gspo_megatron.platform.collectives import on_main
from gspo_megatron.platform.groups import Ranks
from gspo_megatron.process.heartbeat import Heartbeat
from gspo_megatron.process.signals import end_signals, saved_at_interrupt

_LONGEST_WAIT = 60.0  # seconds between two checks of the time left
_SQUEUE_TIMEOUT_SECONDS = 30
_TIME = re.compile(r"(?:(\d+)-)?(?:(?:(\d+):)?(\d+):)?(\d+)")  # days-hours:minutes:seconds


@dataclass(frozen=True)
class SlurmJob:
    """The Slurm job of this process."""

    number: str
    restarts: int  # how often Slurm has put the job back into the queue
    end: float | None = None  # seconds since 1970, as known when the process started

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> SlurmJob | None:
        """Read the job from the environment's variables. Returns None outside a job."""
        number = environ.get("SLURM_JOB_ID")
        if not number:
            return None
        end = environ.get("SLURM_JOB_END_TIME", "")
        restarts = int(environ.get("SLURM_RESTART_COUNT") or 0)
        return cls(number, restarts, float(end) if end.isdecimal() else None)

    def seconds_left(self) -> float | None:
        """Return the seconds until the job's time limit, which may change while the job runs.
        Returns None if the job has no limit, or if neither squeue nor the environment tells the
        limit."""
        form = "%A %L"  # the number of the job, and its time left
        command = ("squeue", "--noheader", "--jobs", self.number, "--format", form)
        printed = output_of(*command, seconds=_SQUEUE_TIMEOUT_SECONDS, SQUEUE_FORMAT=form)
        if printed is None:  # no squeue in a container, or the controller does not answer
            return None if self.end is None else self.end - time.time()
        # A heterogeneous job has a line for each component. An array whose last task is this job
        # has the array's number, and a line for each task.
        lines = (line.split() for line in printed.splitlines())
        times = {words[0]: words[1] for words in lines if len(words) == 2}
        return parse_time_left(times.get(self.number, ""))

    def __str__(self) -> str:
        return f"Slurm job {self.number}, restart {self.restarts}"


def parse_time_left(text: str) -> float | None:
    """Convert squeue's `days-hours:minutes:seconds` to seconds. Returns None for texts that are no
    time, such as UNLIMITED."""
    match = _TIME.fullmatch(text)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


class StopRun(Exception):  # noqa: N818 (no error: the orderly end of a run that was told to stop)
    """Raised on all ranks once the run is saved and may end."""


class StopSignals:
    """Lets signals set `is_requested`, while the context lasts, instead of ending the process.

    With enabled=False the signals keep their usual effect: a run that saves nothing ends at once.
    """

    def __init__(self, *, enabled: bool) -> None:
        # Python takes signals in the main thread only.
        self._enabled = enabled and threading.current_thread() is threading.main_thread()
        self._before: dict[signal.Signals, Any] = {}
        self.is_requested = False
        self.longest_step = 0.0  # seconds
        self._last_boundary: float | None = None

    def request(self) -> None:
        """Request the stop."""
        self.is_requested = True

    @contextlib.contextmanager
    def at_interrupt(self, *, tells: bool) -> Generator[None]:
        """Let Ctrl-C request the stop too, while the context lasts. The context begins with the
        training, because before the training there is nothing to save. `tells`: whether this
        process prints a line about the request."""
        if not self._enabled:
            yield
            return
        with saved_at_interrupt(self.request, tells=tells):
            yield

    def boundary(self) -> None:
        """Mark the end of a step, before the step is saved. A stop that is requested at any time
        takes at most the time between two of these calls."""
        now = time.monotonic()
        if self._last_boundary is not None:
            self.longest_step = max(self.longest_step, now - self._last_boundary)
        self._last_boundary = now

    def __enter__(self) -> StopSignals:
        if self._enabled:
            numbers = (*end_signals(), signal.SIGUSR1)
            self._before = {number: signal.signal(number, self._note) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self.request()


class TimeWatch:
    """Requests a stop early enough that the run is saved before its Slurm job ends.

    While the context lasts, a thread checks the time left. It requests the stop once the time is
    below `margin` seconds plus the longest step so far (with its evaluation and checkpoint),
    because a stop may take that long. Without a `job` the class does nothing.
    """

    def __init__(self, stop: StopSignals, margin: float, job: SlurmJob | None) -> None:
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
            remaining = job.seconds_left()
            needed = self._margin + self._stop.longest_step
            if remaining is not None and remaining <= needed:
                text = f"{remaining:.0f} s left, and a stop may take {needed:.0f} s: stopping"
                self._stop.request()
                tell(f"{job}: {text}")
                return
            wait = _LONGEST_WAIT if remaining is None else (remaining - needed) / 2
            if self._ended.wait(min(_LONGEST_WAIT, max(1.0, wait))):
                return


@contextlib.contextmanager
def watched(
    config: AnyConfig, models: Sequence[torch.nn.Module], ranks: Ranks, stop: StopSignals
) -> Generator[None]:
    """Watch the training inside the context, which every rank enters. A hang ends the run. Ctrl-C
    or the end of a Slurm job requests a stop. Each forward pass of the models is a heartbeat."""
    job = SlurmJob.of(os.environ)
    if job is not None and ranks.is_main:
        tell(f"{job}")
    timeout = config.training.hang_timeout_seconds
    heartbeat = Heartbeat(Path(str(config.logging.dir)), ranks.rank, ranks.world_size, timeout)
    on_main(heartbeat.forget_earlier)
    hooks = [model.register_forward_pre_hook(heartbeat.beat) for model in models]
    # A run that cannot be saved gains nothing by stopping early.
    watches = ranks.is_main and config.checkpoint.interval > 0
    margin = config.training.stop_margin_seconds
    try:
        with (
            TimeWatch(stop, margin, job if watches else None),
            heartbeat,
            stop.at_interrupt(tells=ranks.is_main),
        ):
            yield
    finally:
        for hook in hooks:
            hook.remove()
