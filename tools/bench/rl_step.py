"""Tokens per second over the whole RL step, of this package and of TRL's GRPOTrainer.

    python tools/bench/rl_step.py [--rounds 3] [--steps 10] [--sizes small mid ...] [--busy]

Both sides run the workloads of peers/workload.py on the same cores: a random Qwen3-MoE-shaped
model, GSPO loss, old log-probs, 4 optimizer steps, 2 threads. Sizes small and mid have 128
responses of 32 tokens; long has 64 responses with log-normal lengths up to 512, a larger vocabulary
and 64 experts. smollm2 has the shape of examples/smollm2_moe, 64 responses of 64 tokens and 2
optimizer steps. The lengths are planned, so they are the same on both sides. The sides take turns,
round after round, each in its own process. The output has two figures for each round: our rate /
TRL's rate, and the limit. The limit is the share of our step that the matrix products of the step
take if they run alone on this machine. The last line has the medians. With --busy another program
keeps one core busy all the time. TRL has its own environment, .venv-bench, made on first use from
peers/requirements.txt.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PEERS = Path(__file__).resolve().parent / "peers"
SIZES = {
    "small": 1.0,
    "mid": 1.0,
    "long": 0.1,
    "smollm2": 0.1,
    "smollm2_bf16": 0.1,
}  # share of --steps that is measured; a step of long or smollm2 takes many seconds


def peer_python(environment: Path) -> Path:
    """Return the interpreter of TRL's environment. If the environment is missing, make it."""
    python = environment / "bin" / "python"
    requirements = PEERS / "requirements.txt"
    stamp = environment / ".complete"
    if stamp.exists() and stamp.read_text() == requirements.read_text():
        return python
    print(f"making {environment} (a few minutes) ...", file=sys.stderr)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(environment)], check=True)
    pip = [str(python), "-m", "pip", "install", "--quiet"]
    # torch is installed first and alone, because later packages must not install another build of
    # it
    torch = next(
        line for line in requirements.read_text().splitlines() if line.startswith("torch=")
    )
    subprocess.run([*pip, torch], check=True)
    subprocess.run([*pip, "-r", str(requirements)], check=True)
    stamp.write_text(requirements.read_text())
    return python


def measure(python: Path | str, script: str, size: str, steps: int) -> dict[str, Any]:
    """Run one side. Returns its JSON line."""
    command = [str(python), str(PEERS / script), "--size", size, "--steps", str(steps)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


@contextlib.contextmanager
def busy_core(*, wanted: bool) -> Iterator[None]:
    """Keep the first core busy with a loop, at normal priority, if `wanted`."""
    if not wanted:
        yield
        return
    core = min(os.sched_getaffinity(0))
    loop = f"import os; os.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", loop]) as neighbour:
        try:
            yield
        finally:
            neighbour.kill()


def print_limit(record: dict[str, Any]) -> float:
    """Print which share of each phase's time its matrix products take by themselves. Returns the
    share for the whole step."""
    seconds, limit = record["seconds"], record["limit"]
    for phase, of_phase in limit.items():
        work, alone, whole = of_phase["gflop"], of_phase["alone"], seconds[phase]
        print(
            f"    {phase:<8} {work:6.1f} GFLOP a rank   products alone {alone:.3f} s "
            f"({work / alone:.0f} GFLOP/s)   of {whole:.3f} s: {alone / whole:.2f}"
        )
    return sum(of_phase["alone"] for of_phase in limit.values()) / seconds["step"]


def compare(size: str, rounds: int, steps: int, trl: Path) -> tuple[float, float]:
    """Run and print every round. Returns the medians of two figures: our rate / TRL's rate, and the
    limit, see `print_limit`."""
    ratios, limits, steps = [], [], max(round(steps * SIZES[size]), 1)
    print(f"{size}: tokens/s over the whole RL step, {steps} steps a round")
    for number in range(1, rounds + 1):
        ours = measure(sys.executable, "our_step.py", size, steps)
        theirs = measure(trl, "trl_step.py", size, steps)
        ratio = ours["tokens_per_second"] / theirs["tokens_per_second"]
        ratios.append(ratio)
        print(
            f"  round {number}: ours {ours['tokens_per_second']:7.0f}   "
            f"TRL {theirs['tokens_per_second']:7.0f}   ratio {ratio:.2f}"
        )
        for name, record in (("ours", ours), ("TRL", theirs)):
            parts = "  ".join(f"{key} {value:.3f}" for key, value in record["seconds"].items())
            memory = f"{record['peak_memory_gb']:.1f} GB"
            print(f"    {name:<5} seconds  {parts}   at most {memory}", flush=True)
        limits.append(print_limit(ours))
    return statistics.median(ratios), statistics.median(limits)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="turns of ours and TRL")
    parser.add_argument(
        "--steps",
        type=int,
        default=10,
        help="RL steps measured in a turn; of the larger sizes a tenth of it",
    )
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["small", "mid", "long"])
    parser.add_argument(
        "--environment", type=Path, default=ROOT / ".venv-bench", help="where TRL is installed"
    )
    parser.add_argument("--busy", action="store_true", help="keep one core busy meanwhile")
    arguments = parser.parse_args()
    if min(arguments.rounds, arguments.steps) < 1:
        parser.error("--rounds and --steps must be at least 1")
    trl = peer_python(arguments.environment)
    with busy_core(wanted=arguments.busy):
        found = {s: compare(s, arguments.rounds, arguments.steps, trl) for s in arguments.sizes}
    ratios = [f"ratio_{size}={ratio:.2f}" for size, (ratio, _) in found.items()]
    limits = [f"limit_{size}={limit:.2f}" for size, (_, limit) in found.items()]
    print(" ".join(ratios + limits))


if __name__ == "__main__":
    main()
