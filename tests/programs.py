"""Programs that tests start: their environment, their exit codes, and ways to wait for them."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import IO

from tests import forks

ROOT = Path(__file__).resolve().parents[1]
Process = subprocess.Popen[str] | forks.Fork
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
    cwd: Path | str | None = None,
    input: str | None = None,
    is_new: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run a program and wait for it. Checks that the exit code is the expected one. With an
    expected code of 2, there must be no traceback. `gspo-megatron` is a fork of a process that has
    imported its packages (tests/forks.py), unless it must be a new interpreter (`is_new`). Each
    command is a new interpreter in some test, which shows that its own imports work."""
    program, whole = [*map(str, words)], command_environment() | dict(environ or {})
    if not is_new and input is None and forks.can_fork(program, whole):
        done = forks.run(program, whole, cwd and str(cwd), timeout)
    else:
        done = subprocess.run(
            program,
            env=whole,
            capture_output=True,
            text=True,
            timeout=timeout,
            cwd=cwd,
            input=input,
            check=False,
        )
    said = done.stdout[-_TAIL:] + done.stderr[-_TAIL:]
    assert done.returncode == expect, f"exit code {done.returncode}: {said}"
    assert expect != 2 or "Traceback" not in done.stdout + done.stderr
    return done


def start_program(
    *words: object, environ: Mapping[str, str], out: IO[str] | None = None, err: IO[str]
) -> Process:
    """Start a program whose output goes to files, stdout to nowhere without `out`. `gspo-megatron`
    is a fork, as in run_program."""
    program = [*map(str, words)]
    with open(os.devnull, "r+") as none:
        out = out or none
        if forks.can_fork(program, environ):
            files = [each.fileno() for each in (none, out, err)]
            return forks.start(program, environ, None, files)
        return subprocess.Popen(program, env=environ, stdin=none, stdout=out, stderr=err, text=True)


def gspo(
    *words: object, expect: int = 0, is_new: bool = False, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run `gspo-megatron` with these arguments, as run_program does."""
    program = (sys.executable, "-m", "gspo_megatron")
    return run_program(*program, *words, expect=expect, environ=environ, is_new=is_new)


def module_at(file: Path) -> ModuleType:
    """The module in a file of no package, such as a script of an example. Files beside it may
    import it by its name."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module  # dataclasses look up their module there
    spec.loader.exec_module(module)
    return module


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
    process: Process | None = None,
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
