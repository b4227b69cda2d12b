"""A run inside a Slurm job: it ends before its time is over, and does not start over for ever."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

from gspo_megatron.checkpoint.resume import Start, run_folder
from gspo_megatron.config import Config
from gspo_megatron.data.files import write_atomically
from gspo_megatron.errors import UserError
from gspo_megatron.models.build import Policy
from gspo_megatron.platform.groups import Ranks
from gspo_megatron.platform.slurm import SlurmJob
from gspo_megatron.train.agreement import on_main
from gspo_megatron.train.heartbeat import Heartbeat
from gspo_megatron.train.stop import StopSignals

RESTARTS_FILE = "restarts.json"
_LONGEST_WAIT = 60.0  # seconds between two looks at the time left


def count_restart(config: Config, start: Start, environ: Mapping[str, str] | None = None) -> None:
    """Refuse to go on in a job that has been restarted too often at the same point of the run.

    On the main rank, once a start. Raises UserError, whose exit code no batch script takes for a
    reason to try again.
    """
    job = SlurmJob.of(os.environ if environ is None else environ)
    if job is None or job.restarts == 0:
        return
    path = run_folder(config) / RESTARTS_FILE
    position = None if start.state is None else start.state.position.name
    before = _read(path)
    if before.get("job") == job.number and before.get("position") == position:
        count = int(before["restarts_without_progress"]) + 1
    else:
        # Nothing was written down at the first start, which left a checkpoint or made no progress.
        count = 1 if position is None else 0
    path.parent.mkdir(parents=True, exist_ok=True)
    now = {"job": job.number, "position": position, "restarts_without_progress": count}
    write_atomically(path, (json.dumps(now) + "\n").encode())
    allowed = config.training.idle_restarts
    if count > allowed:
        where = "before its first checkpoint" if position is None else f"at {position}"
        raise UserError(
            f"{run_folder(config)}: restarted {count} times {where} without getting further, of "
            f"training.idle_restarts = {allowed} that are allowed; the log of the job says why it "
            "ended each time. Submit it again to go on"
        )


def _read(path: Path) -> dict[str, object]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


@contextlib.contextmanager
def watched(config: Config, policy: Policy, ranks: Ranks, stop: StopSignals) -> Iterator[None]:
    """Train inside the context; every rank enters it. The rank is alive while its model runs."""
    job = SlurmJob.of(os.environ)
    if job is not None and ranks.is_main:
        print(f"{job}", file=sys.stderr, flush=True)
    timeout = config.training.hang_timeout_seconds
    heartbeat = Heartbeat(run_folder(config), ranks.rank, ranks.world_size, timeout)
    on_main(heartbeat.forget_earlier)
    hooks = [model.register_forward_pre_hook(heartbeat.beat) for model in policy.models]
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
