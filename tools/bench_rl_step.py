"""Tokens per second over the whole RL step, ours beside TRL's GRPOTrainer, on the same cores.

    python tools/bench_rl_step.py [--rounds 3] [--steps 10] [--sizes small mid]

Both halves run the workload of bench_peers/trl_step.py: a random Qwen3-MoE-shaped model, 128
responses of exactly 32 tokens, GSPO loss, old log-probs, 4 optimizer steps, 2 threads. They run in
turn, round after round, each in a process of its own; the ratio of a round compares neighbours in
time, and the last line gives the medians. TRL lives in an environment of its own, made on first use
in .venv-bench from bench_peers/requirements.txt.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PEERS = ROOT / "tools" / "bench_peers"


def peer_python(environment: Path) -> Path:
    """The interpreter of TRL's environment, made if it is not there."""
    python = environment / "bin" / "python"
    requirements = PEERS / "requirements.txt"
    stamp = environment / ".complete"
    if stamp.exists() and stamp.read_text() == requirements.read_text():
        return python
    print(f"making {environment} (a few minutes) ...", file=sys.stderr)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(environment)], check=True)
    pip = [str(python), "-m", "pip", "install", "--quiet"]
    # torch first and alone: what comes later must not pull another build of it
    torch = next(
        line for line in requirements.read_text().splitlines() if line.startswith("torch=")
    )
    subprocess.run([*pip, torch], check=True)
    subprocess.run([*pip, "-r", str(requirements)], check=True)
    stamp.write_text(requirements.read_text())
    return python


def measure(python: Path | str, script: str, size: str, steps: int) -> dict[str, Any]:
    """Run one half; its JSON line."""
    command = [str(python), str(PEERS / script), "--size", size, "--steps", str(steps)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def compare(size: str, rounds: int, steps: int, trl: Path) -> float:
    """Print every round and the split of ours; the median ratio of ours over TRL's."""
    ratios = []
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
            print(f"    {name:<5} seconds  {parts}", flush=True)
    return statistics.median(ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="turns of ours and TRL")
    parser.add_argument("--steps", type=int, default=10, help="RL steps measured in a turn")
    parser.add_argument("--sizes", nargs="+", choices=("small", "mid"), default=["small", "mid"])
    parser.add_argument(
        "--environment", type=Path, default=ROOT / ".venv-bench", help="where TRL is installed"
    )
    parser.add_argument(
        "--profile", action="store_true", help="print where our time goes, and stop"
    )
    arguments = parser.parse_args()
    if min(arguments.rounds, arguments.steps) < 1:
        parser.error("--rounds and --steps must be at least 1")
    if arguments.profile:
        for size in arguments.sizes:
            command = [sys.executable, str(PEERS / "our_step.py"), "--size", size, "--profile"]
            subprocess.run([*command, "--steps", str(arguments.steps)], check=True)
        return
    trl = peer_python(arguments.environment)
    ratios = {s: compare(s, arguments.rounds, arguments.steps, trl) for s in arguments.sizes}
    print(" ".join(f"ratio_{size}={ratio:.2f}" for size, ratio in ratios.items()))


if __name__ == "__main__":
    main()
