"""How a step's time and memory grow with tokens, experts, ranks and the size of a group.

    python tools/bench_growth.py [--sweeps responses length experts ranks group] [--steps 3]

Each sweep changes one number of a small workload (4 layers of 64, 8 experts, 4 prompts x 8
responses of 32 tokens) and measures RL steps of a run in processes of its own, one thread a rank:

    responses   4 to 32 prompts: the tokens of a step x 1, 2, 4, 8
    length      tokens of a response, 32 to 256: the same tokens as above
    experts     8 to 64, top-2
    ranks       1, 2, 4 data-parallel ranks with the same responses together
    group       4 to 32 responses to a prompt, as many responses together

Seconds are processor time of all ranks together, of the fastest step after the first: a busy
machine changes them little. Memory is the largest growth of a rank's resident memory since its
model was built. The last line has the exponent of each, the slope of a line through the logarithms:
1 is linear, 0 is constant.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
sys.path.insert(0, str(Path(__file__).parent / "bench_peers"))

from workload import SHAPES, WORKLOADS, Workload

BASE = Workload(prompts=4, group=8, longest=32, mini_batches=2)
SWEEPS: dict[str, tuple[int, ...]] = {
    "responses": (4, 8, 16, 32),
    "length": (32, 64, 128, 256),
    "experts": (8, 16, 32, 64),
    "ranks": (1, 2, 4),
    "group": (4, 8, 16, 32),
}


def prepare(sweep: str, value: int) -> int:
    """Set the workload of bench_peers up. Returns the number of ranks."""
    work, experts = BASE, 8
    if sweep == "responses":
        work = replace(work, prompts=value)
    elif sweep == "length":
        work = replace(work, longest=value)
    elif sweep == "experts":
        experts = value
    elif sweep == "ranks":
        work = replace(work, prompts=16)
    elif sweep == "group":
        work = replace(work, group=value, prompts=128 // value)
    SHAPES["growth"] = SHAPES["small"] | {"num_experts": experts}
    WORKLOADS["growth"] = work
    return value if sweep == "ranks" else 1


def be_a_rank(steps: int) -> None:
    """Measure steps; the first rank prints the figures."""
    import torch
    import torch.distributed as dist
    from our_step import build_loop

    from gspo_megatron.process.ranks import join_launcher

    join_launcher()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        loop = build_loop("growth", 1 + steps, folder)
        before, seconds = resident_bytes(), []
        for number in range(1, steps + 2):
            start = time.process_time()
            loop.step(number)
            spent = torch.tensor([time.process_time() - start], dtype=torch.float64)
            dist.all_reduce(spent)
            seconds.append(spent.item())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    grown = torch.tensor([peak - before], dtype=torch.float64)
    dist.all_reduce(grown, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        print(json.dumps({"seconds": min(seconds[1:]), "megabytes": grown.item() / 1e6}))


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def measure(sweep: str, value: int, steps: int) -> dict[str, float]:
    """One point, in processes of its own."""
    command = [sys.executable, __file__, "--point", sweep, str(value), "--steps", str(steps)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def exponent(values: tuple[int, ...], figures: list[float]) -> float:
    """The slope of the least-squares line through the logarithms."""
    x, y = ([math.log(number) for number in numbers] for numbers in (values, figures))
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    products = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return products / sum((a - mean_x) ** 2 for a in x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sweeps", nargs="+", choices=SWEEPS, default=list(SWEEPS))
    parser.add_argument("--steps", type=int, default=3, help="after the first one")
    parser.add_argument("--most", type=int, help="leave larger values out")
    parser.add_argument("--point", nargs=2, help=argparse.SUPPRESS)  # one of them, as a process
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error("--steps must be at least 1")
    if arguments.point:
        ranks = prepare(arguments.point[0], int(arguments.point[1]))
        if ranks > 1 and "RANK" not in os.environ:
            from gspo_megatron.process.launcher import launch

            raise SystemExit(launch([sys.executable, *sys.argv], ranks))
        be_a_rank(arguments.steps)
        return
    words = []
    for sweep in arguments.sweeps:
        values = tuple(v for v in SWEEPS[sweep] if v <= (arguments.most or v))
        if len(values) < 2:
            parser.error(f"--most {arguments.most} leaves fewer than two values of {sweep}")
        points = [measure(sweep, value, arguments.steps) for value in values]
        for value, point in zip(values, points, strict=True):
            figures = f"{point['seconds']:8.3f} s  {point['megabytes']:8.1f} MB"
            print(f"{sweep:<10} {value:>4}  {figures}", flush=True)
        for kind in ("seconds", "megabytes"):
            found = exponent(values, [point[kind] for point in points])
            words.append(f"{sweep}_{kind}={found:.2f}")
    print(" ".join(words))


if __name__ == "__main__":
    main()
