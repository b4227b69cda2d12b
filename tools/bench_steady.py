"""Does a step take as long as the first one? Rollouts of one process, beside transformers.

    python tools/bench_steady.py [--rounds 3] [--steps 8]

One process with the threads that torch takes by default, as a user starts it on a workstation: 4
layers of 64, 32 responses of 256 tokens, and a policy update between two rollouts. The peer is
transformers' generate with the same shape, prompts and threads. Each has a process of its own; they
take turns. A thread pool or a memory allocator that the first update disturbs shows as later steps
that are slower. The last line:

    steady          seconds of the slowest rollout divided by those of the first; target 1.05
    steady_step     the same of whole steps
    ratio_generate  our tokens a second in a rollout after the first update, over those of
                    transformers; target 1.2

Each is the median of the rounds. With --trace every step says how often the process waited for a
page of memory, and its threads for each other.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "bench_peers"))

from workload import SEED, SHAPES, WORKLOADS

SIZE = "steady"
TOKENS = sum(WORKLOADS[SIZE].lengths(1))


def our_steps(steps: int) -> list[dict[str, float]]:
    """Seconds of the rollout and of the whole of each RL step, and what it waited for."""
    from our_step import build_loop

    found = []
    with tempfile.TemporaryDirectory() as folder:
        loop = build_loop(SIZE, steps, folder)
        for number in range(1, steps + 1):
            before = resource.getrusage(resource.RUSAGE_SELF)
            metrics = loop.step(number)
            after = resource.getrusage(resource.RUSAGE_SELF)
            found.append(
                {
                    "rollout": metrics["perf/rollout_seconds"],
                    "step": metrics["perf/step_seconds"],
                    "processor": after.ru_utime - before.ru_utime,
                    "system": after.ru_stime - before.ru_stime,
                    "page_faults": after.ru_minflt - before.ru_minflt,
                    "waits": after.ru_nvcsw - before.ru_nvcsw,
                }
            )
    return found


def peer_steps(steps: int) -> list[dict[str, float]]:
    """Seconds of each call of transformers' generate."""
    import torch
    from trl_step import Choices, build_model

    work, found = WORKLOADS[SIZE], []
    model = build_model(SIZE, Choices("sdpa", "grouped_mm", None, False)).eval()
    generator = torch.Generator().manual_seed(SEED)
    for _ in range(steps):
        size = (work.prompts, work.prompt_tokens)
        prompts = torch.randint(SHAPES[SIZE]["vocab_size"], size, generator=generator)
        prompts = prompts.repeat_interleave(work.group, 0)
        start = time.perf_counter()
        with torch.no_grad():
            responses = model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                max_new_tokens=work.longest,
                do_sample=True,
                top_k=0,
                eos_token_id=None,
                pad_token_id=0,
            )
        found.append({"rollout": time.perf_counter() - start})
        assert responses.shape == (work.responses, work.prompt_tokens + work.longest)
    return found


SIDES = {"ours": our_steps, "transformers": peer_steps}


def measure(side: str, steps: int) -> list[dict[str, float]]:
    """The steps of one side in a process of its own, with torch's default number of threads."""
    environ = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    command = [sys.executable, __file__, "--side", side, "--steps", str(steps)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def compare(rounds: int, steps: int, trace: bool) -> dict[str, float]:
    """Print every round. Returns the figures of the last line."""
    found: dict[str, list[float]] = {"steady": [], "steady_step": [], "ratio_generate": []}
    for number in range(1, rounds + 1):
        ours, theirs = (measure(side, steps) for side in SIDES)
        for name, records, key in (
            ("our rollouts", ours, "rollout"),
            ("our steps", ours, "step"),
            ("generate", theirs, "rollout"),
        ):
            seconds = "  ".join(f"{record[key]:.3f}" for record in records)
            print(f"round {number}: {name:<13} seconds  {seconds}", flush=True)
        if trace:
            for record in ours:
                print("  ", " ".join(f"{key}={value:.4g}" for key, value in record.items()))
        found["steady"].append(largest_to_first(ours, "rollout"))
        found["steady_step"].append(largest_to_first(ours, "step"))
        rates = [
            TOKENS / statistics.median(record["rollout"] for record in records[1:])
            for records in (ours, theirs)
        ]
        print(f"  tokens/s in a rollout: ours {rates[0]:.0f}, transformers {rates[1]:.0f}")
        found["ratio_generate"].append(rates[0] / rates[1])
    return {name: statistics.median(values) for name, values in found.items()}


def largest_to_first(records: list[dict[str, Any]], key: str) -> float:
    first, *later = (record[key] for record in records)
    return max(later) / first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="turns of both sides")
    parser.add_argument("--steps", type=int, default=8, help="of a turn; at least 2")
    parser.add_argument("--trace", action="store_true", help="print what each step waited for")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)  # in its own process
    arguments = parser.parse_args()
    if arguments.rounds < 1 or arguments.steps < 2:
        parser.error("--rounds must be at least 1, --steps at least 2")
    if arguments.side:
        print(json.dumps(SIDES[arguments.side](arguments.steps)))
        return
    figures = compare(arguments.rounds, arguments.steps, arguments.trace)
    print(" ".join(f"{name}={value:.2f}" for name, value in figures.items()))


if __name__ == "__main__":
    main()
