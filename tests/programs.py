"""Programs that tests start: their environment, their exit codes, and ways to wait for them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_TAIL = 3000  # the last characters of a program's output, for the message of a failure


def command_environment() -> dict[str, str]:
    """The environment without variables that would make the command a rank of another job."""
    hidden = ("SLURM_", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "PET_", "SKYPILOT_")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(hidden)}
    return kept | {"OMP_NUM_THREADS": "1"}


def run_program(
    *words: object,
    expect: int = 0,
    environ: Mapping[str, str] | None = None,
    timeout: float = 240,
    **options: Any,
) -> subprocess.CompletedProcess[str]:
    """Run a program and wait for it. Checks that the exit code is the expected one. With an
    expected code of 2, there must be no traceback."""
    done = subprocess.run(
        [*map(str, words)],
        env=command_environment() | dict(environ or {}),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        **options,
    )
    said = done.stdout[-_TAIL:] + done.stderr[-_TAIL:]
    assert done.returncode == expect, f"exit code {done.returncode}: {said}"
    assert expect != 2 or "Traceback" not in done.stdout + done.stderr
    return done


def gspo(*words: object, expect: int = 0, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run `gspo-megatron` with these arguments."""
    program = (sys.executable, "-m", "gspo_megatron")
    return run_program(*program, *words, expect=expect, environ=environ)


def peak_memory(*words: str) -> int:
    """The largest resident set of a Python process, in bytes. The Python process is started by a
    small process, because a new process begins with the peak of its parent."""
    script = (
        "import json, os, subprocess, sys\n"
        "process = subprocess.Popen(sys.argv[1:], stdout=2)\n"
        "_, status, usage = os.wait4(process.pid, 0)\n"
        "print(json.dumps([status, usage.ru_maxrss * 1024]))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script, sys.executable, *words],
        capture_output=True,
        text=True,
        env=command_environment(),
        check=True,
    )
    status, peak = json.loads(result.stdout)
    assert status == 0, result.stderr
    return peak


def wait_until(
    condition: Callable[[], object],
    process: subprocess.Popen[str] | None = None,
    seconds: float = 120,
) -> bool:
    """Wait until the condition holds or the process has ended. Returns whether the condition
    holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        if process is not None and process.poll() is not None:
            return False
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.001)
    return True
