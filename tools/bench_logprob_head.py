"""Memory and time of the log-prob head and of full-size logits, forward and backward.

    python tools/bench_logprob_head.py [--rows 4096] [--vocab 151936] [--hidden 512] [--tp 1]
                                       [--dtype float32] [--matmul highest] [--rounds 3] [--sweep]

Three sides give log-probabilities and entropies: ours (gspo_megatron.models.logprob_head), the
straightforward way (all logits, then the steps of Megatron-Core's vocab-parallel cross entropy),
and slime's way (a softmax in addition to the logits). Measured: peak memory above inputs, weight
and their gradients, each side in its own process; seconds of forward and backward, the sides in
turn in one process, as medians and as the median ratio of a round; and the distance from float64.
The table also has the processor time of the first rank: with OMP_NUM_THREADS=1 it can be compared
on a busy machine, the clock cannot. Runs on a GPU if there is one. The other sides need three times
the memory of the logits, 2.5 GB by default. --sweep compares tile sizes of our side; it gave the
defaults of the head. The last line is for programs; its `memory` is a share of the logits in
float32.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

WORKER = Path(__file__).parent / "bench_peers" / "measure_head.py"
SIDES = ("ours", "straightforward", "shared_softmax")
SWEEP = (
    *(f"ours:{size}" for size in (2, 4, 8, 16, 32, 64)),
    *(f"ours:16:{rows}" for rows in (256, 1024, 2048)),
)
GPU_SWEEP = (
    *(f"ours:{size}" for size in (16, 32, 64, 128, 256, 512)),
    *(f"ours:128:{rows}" for rows in (1024, 4096, 8192)),
    *(f"ours:512:{rows}" for rows in (4096, 8192)),
)


def measure(task: str, sides: tuple[str, ...], arguments: argparse.Namespace) -> Any:
    """The JSON line of one measurement."""
    command = [sys.executable, str(WORKER), task, "--sides", *sides]
    for name in ("rows", "vocab", "hidden", "dtype", "rounds", "tp", "matmul"):
        command += [f"--{name}", str(getattr(arguments, name))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def ratio(seconds: dict[str, dict[str, list[float]]], side: str, kind: str) -> float:
    """Median over the rounds of our seconds divided by the side's seconds in the same round."""
    pairs = zip(seconds["ours"][kind], seconds[side][kind], strict=True)
    return statistics.median(ours / theirs for ours, theirs in pairs)


def compare(arguments: argparse.Namespace) -> None:
    """Print memory, time and error of all sides, and the line for programs."""
    logits_bytes = 4 * arguments.rows * arguments.vocab / arguments.tp
    memory = {side: measure("memory", (side,), arguments)["bytes"] for side in SIDES}
    errors = measure("error", SIDES, arguments)
    seconds = measure("time", SIDES, arguments)
    print(
        f"{'side':<16} extra MB  of logits    error  seconds  ours/its  processor  ours/its  rounds"
    )
    for side in SIDES:
        clock, processor = (statistics.median(seconds[side][k]) for k in ("clock", "processor"))
        rounds = " ".join(f"{s:.2f}" for s in seconds[side]["clock"])
        print(
            f"{side:<16} {memory[side] / 1e6:8.0f} {memory[side] / logits_bytes:10.1%} "
            f"{max(errors[side].values()):8.1e} {clock:8.2f} {ratio(seconds, side, 'clock'):9.2f} "
            f"{processor:10.2f} {ratio(seconds, side, 'processor'):9.2f}  {rounds}"
        )
    figures = {
        "memory": memory["ours"] / logits_bytes,
        "memory_straightforward": memory["straightforward"] / logits_bytes,
        "memory_shared_softmax": memory["shared_softmax"] / logits_bytes,
        "seconds": statistics.median(seconds["ours"]["clock"]),
    }
    for side in SIDES[1:]:
        figures[f"time_ratio_{side}"] = ratio(seconds, side, "clock")
        figures[f"processor_ratio_{side}"] = ratio(seconds, side, "processor")
    figures["error"] = max(errors["ours"].values())
    print(" ".join(f"{name}={value:.3g}" for name, value in figures.items()))


def sweep(arguments: argparse.Namespace) -> None:
    """Print memory and time of our side with tiles of several sizes."""
    logits_bytes = 4 * arguments.rows * arguments.vocab / arguments.tp
    import torch

    sides = GPU_SWEEP if torch.cuda.is_available() else SWEEP
    seconds = measure("time", sides, arguments)
    best = {side: {k: min(v) for k, v in kinds.items()} for side, kinds in seconds.items()}
    print("tile MiB     rows  of logits  best seconds  of processor")
    for side in sides:
        memory = measure("memory", (side,), arguments)["bytes"]
        _, size, rows, *_ = (*side.split(":"), "default")
        clock, processor = best[side]["clock"], best[side]["processor"]
        print(
            f"{size:>8} {rows:>8} {memory / logits_bytes:10.1%} {clock:13.2f} {processor:13.2f}",
            flush=True,
        )
    fastest = min(sides, key=lambda side: best[side]["clock"])
    print(f"fastest={fastest.removeprefix('ours:')} seconds={best[fastest]['clock']:.3g}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=4096, help="tokens")
    parser.add_argument("--vocab", type=int, default=151_936, help="over all tensor-parallel ranks")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument(
        "--tp", type=int, default=1, help="ranks with a part of the vocabulary each"
    )
    parser.add_argument("--rounds", type=int, default=3, help="turns of all sides")
    parser.add_argument(
        "--matmul",
        choices=("highest", "high", "medium"),
        default="highest",
        help="torch.set_float32_matmul_precision, for all sides; watch the error",
    )
    parser.add_argument("--sweep", action="store_true", help="compare tile sizes of our side")
    arguments = parser.parse_args()
    sizes = (arguments.rows, arguments.vocab, arguments.hidden, arguments.tp, arguments.rounds)
    if min(sizes) < 1:
        parser.error("--rows, --vocab, --hidden, --tp and --rounds must be at least 1")
    print(
        f"{arguments.rows} rows, vocabulary {arguments.vocab} on {arguments.tp} rank(s), "
        f"hidden {arguments.hidden}, {arguments.dtype}, matmul precision {arguments.matmul}",
        flush=True,
    )
    (sweep if arguments.sweep else compare)(arguments)


if __name__ == "__main__":
    main()
