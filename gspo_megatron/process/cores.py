"""The cores and open files that a process may use."""

from __future__ import annotations

import contextlib
import os
import resource
from pathlib import Path

# Files of the quota and the period, for cgroups version 2 and 1. The quota is the processor time in
# one period; both are in microseconds.
_QUOTA_FILES = (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"))


def usable_cores(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the number of cores for the threads of this process: the number of cores that the
    process may run on, or the quota of its container if the quota is less. Libraries ignore the
    quota when they start threads."""
    on_linux = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if on_linux else os.cpu_count() or 1
    for names in _QUOTA_FILES:
        with contextlib.suppress(OSError, ValueError):  # no such file, or "max" for no quota
            texts = [(cgroup / name).read_text() for name in names]
            quota, period = map(int, " ".join(texts).split())
            if quota > 0:  # -1: no quota
                cores = min(cores, max(1, round(quota / period)))
    return cores


def raise_open_files() -> None:
    """Raise the limit of open files and connections to the hard limit.

    The usual soft limit, 1,024, is below the number of responses in progress on a few servers. And
    an agent's program takes several files of this process, for each episode of a step.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
