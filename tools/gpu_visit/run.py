"""Run the checks of steps.py, each within its time limit, and save each result at once.

    python tools/gpu_visit/run.py OUT              # a visit: minutes, the important checks first
    python tools/gpu_visit/run.py OUT --hour       # all checks
    python tools/gpu_visit/run.py OUT --only tests verify

OUT/visit.json has the status, seconds and figures of each step. OUT/visit.txt has the same as a
table. Both are written again after each step, so a visit that is cut off keeps its results.
OUT/logs.txt has the output of all steps. If a step fails, hangs or is not possible on this machine,
the remaining steps still run. The exit code is 1 if a step failed or ran out of time, and 2 if
nothing can be checked on this machine.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from steps import NOT_HERE, Machine, Step, all_steps, write_config

ROOT = Path(__file__).resolve().parents[2]
VISIT_SECONDS = 540
_LEAST_SECONDS = 5  # no step is started if less time is left
_TAIL = 12  # how many lines of a failed step's output are printed
RUN_FIGURES = ("loss", "grad_norm", "mismatch/abs_mean", "mismatch/max", "perf/step_seconds")
_FIGURE = re.compile(r"(?<!\S)([\w./-]+)=([^\s=]+)(?!\S)")


def run_step(step: Step, seconds: float, log: Path) -> dict[str, Any]:
    """Run a step and all processes that it starts for at most `seconds`. Returns its record."""
    record: dict[str, Any] = {"shows": step.shows, "limit_seconds": round(seconds)}
    if step.needs is not None and importlib.util.find_spec(step.needs) is None:
        return record | {"status": "left out", "says": f"{step.needs} is not installed"}
    started, output = time.monotonic(), ""
    environ = os.environ | {"PYTHONUNBUFFERED": "1", "COLUMNS": "150"}
    process = subprocess.Popen(
        step.command,
        cwd=ROOT,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # so that a step that hangs is ended with its children
    )
    try:
        output, _ = process.communicate(timeout=seconds)
        status = {0: "ok", NOT_HERE: "not here"}.get(process.returncode, "FAILED")
    except subprocess.TimeoutExpired:
        status = "TIME OUT"
    finally:  # also after Ctrl-C, which does not reach the step in its own session
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # what is left of the step
    if status == "TIME OUT":
        with contextlib.suppress(subprocess.TimeoutExpired):
            output, _ = process.communicate(timeout=5)  # the output before the step was ended
    taken = time.monotonic() - started
    with contextlib.suppress(OSError), log.open("a") as file:
        print(f"== {step.name}: {' '.join(step.command)}\n{output}", file=file)
    lines = [line for line in output.splitlines() if line.strip()] or [""]
    record |= {"status": status, "seconds": round(taken, 1), "exit_code": process.returncode}
    figures = next(filter(None, (figures_of(line) for line in reversed(lines[-5:]))), {})
    if step.metrics is not None and status == "ok":
        figures = figures_of_run(step.metrics)
    if figures:
        record["figures"] = figures
    record["says"] = lines[-1].strip()[-300:]
    if status not in ("ok", "not here"):
        record["tail"] = lines[-_TAIL:]
    return record


def figures_of(line: str) -> dict[str, float | str]:
    """Return the pairs of a line that consists of name=value words, with numbers as floats. For a
    line with any other word, the result is empty."""
    pairs = _FIGURE.findall(line)
    if not pairs or len(pairs) != len(line.split()):
        return {}
    return {name: _number(value) for name, value in pairs}


def figures_of_run(metrics: Path) -> dict[str, float | str]:
    """Return the metrics of a run's last step that can be compared between different kinds of
    runs."""
    try:
        last = json.loads(metrics.read_text().splitlines()[-1])
    except (OSError, ValueError, IndexError):
        return {}
    return {name: last[name] for name in RUN_FIGURES if isinstance(last.get(name), float)}


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def describe() -> dict[str, Any]:
    """Describe this machine and its software versions."""
    import torch

    from gspo_megatron.observe.environment import describe_environment

    found: dict[str, Any] = dict(describe_environment())
    found["date"] = time.strftime("%Y-%m-%d", time.gmtime())
    found["gpu_name"] = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return found


def table(results: dict[str, Any]) -> str:
    """Return the results as a table for people to read."""
    lines = [f"{'step':<18} {'result':<9} {'s':>6}  what it says"]
    for name, record in results["steps"].items():
        figures = record.get("figures")
        says = record["says"]
        if figures:
            says = " ".join(f"{k}={v:g}" if isinstance(v, float) else f"{k}={v}"
                            for k, v in figures.items())  # fmt: skip
        lines.append(f"{name:<18} {record['status']:<9} {record.get('seconds', 0):>6}  {says}")
    return "\n".join(lines)


def write(out: Path, results: dict[str, Any]) -> None:
    """Write visit.json and visit.txt. If the disk is full, the results are only on the terminal."""
    for name, text in (
        ("visit.json", json.dumps(results, indent=1)),
        ("visit.txt", table(results)),
    ):
        part = out / f"{name}.part"
        try:
            part.write_text(text + "\n")
            part.replace(out / name)
        except OSError as error:
            print(f"   {out / name}: not written: {error.strerror}", flush=True)


def run_all(
    steps: Sequence[tuple[Step, float]], out: Path, results: dict[str, Any], seconds: float
) -> int:
    """Run the steps. Each step ends within its own limit, and all steps end within `seconds`.
    Returns the number of failures."""
    deadline, failed = time.monotonic() + seconds, 0
    for step, limit in steps:
        left = deadline - time.monotonic()
        if left < _LEAST_SECONDS:
            record = {"shows": step.shows, "status": "left out", "says": "no time was left"}
        else:
            print(f"== {step.name} (at most {min(limit, left):.0f} s): {step.shows}", flush=True)
            try:
                record = run_step(step, min(limit, left), out / "logs.txt")
            except OSError as error:  # for example no memory for a process, or no file descriptors
                record = {"shows": step.shows, "status": "FAILED", "says": str(error)}
        failed += record["status"] in ("FAILED", "TIME OUT")
        results["steps"][step.name] = record
        for line in record.get("tail", ()):
            print(f"   | {line}")
        if record["status"] not in ("FAILED", "TIME OUT"):
            record.pop("tail", None)
        print(
            f"   {record['status']} in {record.get('seconds', 0)} s: {record['says']}", flush=True
        )
        write(out, results)
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, metavar="OUT", help="folder of the results")
    parser.add_argument("--hour", action="store_true", help="all checks, with longer limits")
    parser.add_argument("--only", nargs="+", default=[], metavar="STEP", help="these checks alone")
    parser.add_argument(
        "--seconds", type=float, help=f"for all (default: {VISIT_SECONDS}, or none)"
    )
    parser.add_argument("--patience", type=float, default=1.0, help="longer limits, by a factor")
    arguments = parser.parse_args()
    import torch

    seen = torch.cuda.device_count()
    machine = Machine(
        arguments.out.resolve(),
        int(os.environ.get("GPUS", seen)),
        seen,
        seen == 0 or torch.version.cuda is None,
        os.environ.get("VLLM_PYTHON"),
    )
    if machine.gpus < 1:
        print("torch sees no GPU here; GPUS=1 rehearses the steps on the CPU", file=sys.stderr)
        return 2
    known = all_steps(machine)
    unknown = sorted(set(arguments.only) - {step.name for step in known})
    if unknown:
        parser.error(f"no such step: {', '.join(unknown)}; there are "
                     f"{', '.join(step.name for step in known)}")  # fmt: skip
    chosen = []
    for step in known:
        is_named = step.name in arguments.only or step.name == "data"
        in_all = not arguments.only and (arguments.hour or step.seconds is not None)
        if is_named or in_all:
            is_long = arguments.hour or step.seconds is None
            limit = 60 * step.minutes if is_long else step.seconds
            chosen.append((step, arguments.patience * limit))
    try:
        write_config(machine)
    except OSError as error:  # the disk may be full; steps without a run are still possible
        print(f"{machine.config}: not written: {error.strerror}", flush=True)
    results: dict[str, Any] = {"machine": describe(), "steps": {}}
    most = float("inf") if arguments.hour else VISIT_SECONDS * arguments.patience
    failed = run_all(chosen, machine.out, results, arguments.seconds or most)
    print(f"\n{table(results)}\n\n{failed} steps failed; results in {machine.out}/visit.json")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
