"""The Slurm job of this process: its number, its restarts, its end."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass

from gspo_megatron.observe.environment import output_of

_SQUEUE_TIMEOUT_SECONDS = 30
_TIME = re.compile(r"(?:(\d+)-)?(?:(?:(\d+):)?(\d+):)?(\d+)")  # days-hours:minutes:seconds


@dataclass(frozen=True)
class SlurmJob:
    """The job of this process."""

    number: str
    restarts: int  # how often Slurm has put it back into the queue
    end: float | None = None  # seconds since 1970, as known when the process started

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> SlurmJob | None:
        """The job of the environment's variables; None outside a job."""
        number = environ.get("SLURM_JOB_ID")
        if not number:
            return None
        end = _whole_number(environ.get("SLURM_JOB_END_TIME"))
        restarts = _whole_number(environ.get("SLURM_RESTART_COUNT")) or 0
        return cls(number, restarts, end)

    def seconds_left(self) -> float | None:
        """Seconds until the job's time limit, which may change while it runs; None without a limit,
        or where neither squeue nor the environment has it."""
        command = ("squeue", "--noheader", "--jobs", self.number, "--format", "%L")
        printed = output_of(*command, seconds=_SQUEUE_TIMEOUT_SECONDS, SQUEUE_FORMAT="%L")
        if printed is None:  # none in a container; a controller is away
            return None if self.end is None else self.end - time.time()
        return parse_time_left(printed)

    def __str__(self) -> str:
        return f"Slurm job {self.number}, restart {self.restarts}"


def parse_time_left(text: str) -> float | None:
    """Seconds of squeue's `days-hours:minutes:seconds`; None for UNLIMITED and the like."""
    found = _TIME.fullmatch(text)
    if found is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def _whole_number(text: str | None) -> int | None:
    return int(text) if text and text.isascii() and text.isdigit() else None
