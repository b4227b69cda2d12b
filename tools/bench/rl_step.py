"""Tokens per second over the whole RL step, of this package and of TRL's GRPOTrainer.

    python tools/bench/rl_step.py [--rounds 3] [--steps 10] [--sizes small mid ...]

Both sides run the workloads of peers/workload.py on the same cores: a random Qwen3-MoE-shaped
model, GSPO loss, old log-probs, 4 optimizer steps, 2 threads. Sizes small and mid have 128
responses of 32 tokens; long has 64 responses with log-normal lengths up to 512, a larger vocabulary
and 64 experts. smollm2 has the shape of examples/smollm2_moe, 64 responses of 64 tokens and 2
optimizer steps. The lengths are planned, so they are the same on both sides. The sides take turns,
round after round, each in its own process. The output has our rate / TRL's rate for each round; the
last line has the medians. TRL has its own environment, .venv-bench, made on first use from
peers/requirements.txt.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
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
    requirements, stamp = PEERS / "requirements.txt", environment / ".complete"
    pins = requirements.read_text()
    if stamp.exists() and stamp.read_text() == pins:
        return python
    print(f"making {environment} (a few minutes) ...", file=sys.stderr)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(environment)], check=True)
    pip = [str(python), "-m", "pip", "install", "--quiet"]
    # torch is installed first and alone: later packages must not install another build of torch
    torch = next(line for line in pins.splitlines() if line.startswith("torch="))
    subprocess.run([*pip, torch], check=True)
    subprocess.run([*pip, "-r", str(requirements)], check=True)
    stamp.write_text(pins)
    return python


def measure(python: Path | str, script: str, size: str, steps: int) -> dict[str, Any]:
    """Run one side. Returns its JSON line."""
    command = [str(python), str(PEERS / script), "--size", size, "--steps", str(steps)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def compare(size: str, rounds: int, steps: int, trl: Path) -> float:
    """Run and print every round. Returns the median of our rate / TRL's rate."""
    ratios, steps = [], max(round(steps * SIZES[size]), 1)
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
    return statistics.median(ratios)


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
    arguments = parser.parse_args()
    if min(arguments.rounds, arguments.steps) < 1:
        parser.error("--rounds and --steps must be at least 1")
    trl = peer_python(arguments.environment)
    found = {s: compare(s, arguments.rounds, arguments.steps, trl) for s in arguments.sizes}
    print(" ".join(f"ratio_{size}={ratio:.2f}" for size, ratio in found.items()))


if __name__ == "__main__":
    main()
