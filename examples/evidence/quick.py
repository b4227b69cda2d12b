"""Measure one point of each figure again, and compare it with the kept lines.

    python examples/evidence/quick.py [--without-vllm]

The exit code is 1 if a result is outside its kept interval. The responses use the same random
numbers as the kept line, except the responses for the true gradient.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import records

from gspo_megatron.process.failures import run_script

Record = Mapping[str, Any]
POINTS = {
    "gradients": ["--length", "8", "--updates", "1"],
    "volatility": ["--experts", "32", "--rates", "1e-3"],
    "likelihoods": ["--dtype", "bfloat16"],
}
# The tolerance for the share of experts that change in a layer. Kept lines have no interval for
# this share.
SHARE = 0.02


def kept_line(name: str, again: Record) -> Record:
    """The kept line with the setting of the new result `again`."""
    same = ("setting", "updates", "dtype")
    wanted = {key: again[key] for key in same if key in again}
    lines = records.read(records.RESULTS / f"{name}.jsonl")
    return next(line for line in lines if wanted.items() <= line.items())


def comparisons(name: str, again: Record, kept: Record) -> Iterator[tuple[str, float, list[float]]]:
    """Yield the name of what is compared, the new value, and the kept [value, low, high]."""
    if name == "gradients":
        for arm, figures in kept["arms"].items():
            for figure in ("projection", "noise", "signal"):
                yield f"{arm}, {figure}", again["arms"][arm][figure][0], figures[figure]
    elif name == "volatility":
        for layer, share in enumerate(kept["changed_experts"]["1"]):
            now = again["changed_experts"]["1"][layer]
            yield f"experts changed, layer {layer + 1}", now, [share, share - SHARE, share + SHARE]
    else:
        for length, figures in kept["lengths"].items():
            for figure in ("sequence_abs", "outside_paper"):
                now = again["lengths"][length][figure][0]
                yield f"{length} tokens, {figure}", now, figures[figure]


def outside(name: str, again: Record, kept: Record) -> int:
    """Print all comparisons. Returns how many values are outside."""
    count = 0
    for what, now, (value, low, high) in comparisons(name, again, kept):
        bad = not low <= now <= high
        count += bad
        mark = "OUTSIDE" if bad else "inside"
        print(f"  {what}: {now:.4g}, kept {value:.4g} [{low:.4g}, {high:.4g}] {mark}")
    return count


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--without-vllm", action="store_true", help="leave the engine out")
    names = [n for n in POINTS if n != "likelihoods" or not parser.parse_args().without_vllm]
    failures, start = 0, time.monotonic()
    for name in names:
        with tempfile.TemporaryDirectory(prefix="evidence-") as folder:
            output = Path(folder, "again.jsonl")
            script = str(records.HERE / f"{name}.py")
            subprocess.run(
                [sys.executable, script, *POINTS[name], "--output", str(output)], check=True
            )
            again = records.read(output)[0]
        print(f"{name} {' '.join(POINTS[name])}")
        failures += outside(name, again, kept_line(name, again))
    print(f"outside={failures} seconds={time.monotonic() - start:.0f}")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(run_script(main))
