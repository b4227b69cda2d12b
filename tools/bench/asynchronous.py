"""Compares the steps of asynchronous and synchronous runs, with a real vLLM server.

    python tools/bench/asynchronous.py --python VLLM_PYTHON [--steps 10] [--rounds 3]

The model is a small MoE with random weights. Server and trainer have one core each, so neither
takes time from the other. The lengths of responses are skewed: nearly geometric, up to 512 tokens.
Each round trains on the same prompts with rollout.max_staleness 0, 1 and 2, one run after the
other.

    rollout   seconds from the start of a synchronous step until its responses are complete
    train     the rest of the synchronous step: update, new weights for the server
    speedup_1 seconds of a synchronous step / seconds of a step with max_staleness 1
    bound_1   seconds of a step with max_staleness 1 / the longer of rollout and train; 1 if neither
              server nor trainer ever waits

The first two steps do not count: the server compiles, and no responses were generated ahead yet.
The last two steps do not count either, because no responses are generated ahead any more. The
figures are means over the remaining steps, so a long response counts as much as it costs. The last
line has the medians of the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from gspo_megatron.data.toy import write_toy_dataset

_LONGEST = 512  # tokens of a response
_STALENESS = (0, 1, 2)


def config_of(arguments: argparse.Namespace, folder: Path, staleness: int) -> dict[str, Any]:
    return {
        # vLLM's kernels need heads of at least 32 channels
        "model": {
            "megatron": {
                "kv_channels": 32,
                "hidden_size": arguments.hidden,
                "moe_ffn_hidden_size": arguments.hidden,
            },
            "max_sequence_length": 1024,
        },
        "data": {
            "tokenizer": str(folder / "toy" / "tokenizer.model"),
            "prompts": str(folder / "toy" / "train.jsonl"),
        },
        "rollout": {
            "engine": "vllm",
            "max_staleness": staleness,
            "prompts_per_step": arguments.prompts,
            "group_size": 8,
            "max_response_tokens": _LONGEST,
            "vllm": {
                "servers": 1,
                "python": str(folder / "python"),
                "options": {"max_num_seqs": arguments.slots},
            },
        },
        "reward": {"name": "per_character"},
        "objective": {"name": "gspo", "mini_batches": 4},
        # so small that the lengths of responses do not change
        "optimizer": {"learning_rate": 1e-6},
        "training": {"steps": arguments.steps, "precision": "fp32", "micro_batch_tokens": 4096},
        "checkpoint": {"interval": 0},
        "logging": {"dir": str(folder / f"run_{staleness}"), "plots": False},
    }


def pin_server(arguments: argparse.Namespace, folder: Path, core: int) -> None:
    """Write folder/python, which runs the server's interpreter on one core."""
    path = folder / "python"
    words = shlex.join(["taskset", "-c", str(core), arguments.python])
    path.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
    path.chmod(0o755)


def steps_of(folder: Path, staleness: int) -> list[dict[str, float]]:
    """Return the metrics of the steps that count."""
    text = (folder / f"run_{staleness}" / "metrics.jsonl").read_text()
    steps = [json.loads(line) for line in text.splitlines()]
    return [each for each in steps if "perf/step_seconds" in each][2 : -max(_STALENESS)]


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Run one round. Returns its figures."""
    trainer, server = sorted(os.sched_getaffinity(0))[:2]
    pin_server(arguments, folder, server)
    write_toy_dataset(folder / "toy", "mixed", train=64, test=8, seed=1)
    seconds = {}
    for staleness in _STALENESS:
        path = folder / f"{staleness}.yaml"
        path.write_text(yaml.safe_dump(config_of(arguments, folder, staleness)))
        words = ["taskset", "-c", str(trainer), sys.executable, "-m", "gspo_megatron", "train"]
        quiet = {"stdout": subprocess.DEVNULL, "env": {**os.environ, "OMP_NUM_THREADS": "1"}}
        subprocess.run([*words, str(path)], check=True, **quiet)
        steps = steps_of(folder, staleness)
        seconds[staleness] = statistics.mean(each["perf/step_seconds"] for each in steps)
        if staleness == 0:
            rollout = statistics.mean(each["perf/rollout_seconds"] for each in steps)
            sync = statistics.mean(each["perf/sync_seconds"] for each in steps)
            tokens = statistics.mean(each["response/length_mean"] for each in steps)
    train = seconds[0] - rollout
    figures = {"step_0": seconds[0], "rollout": rollout, "train": train, "sync": sync}
    for staleness in _STALENESS[1:]:
        figures |= {
            f"step_{staleness}": seconds[staleness],
            f"speedup_{staleness}": seconds[0] / seconds[staleness],
            f"bound_{staleness}": seconds[staleness] / max(rollout, train),
        }
    return {**figures, "length_mean": tokens}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", required=True, help="of an environment that has vLLM")
    parser.add_argument("--steps", type=int, default=12, help="at least 6: four do not count")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=16, help="of a step, 8 responses to each")
    parser.add_argument("--slots", type=int, default=64, help="responses at a time")
    parser.add_argument("--hidden", type=int, default=256, help="sizes of the model")
    arguments = parser.parse_args()
    if arguments.steps < 6 or len(os.sched_getaffinity(0)) < 2:
        parser.error("at least 6 steps and two cores are needed")
    rounds = []
    for number in range(1, arguments.rounds + 1):
        with tempfile.TemporaryDirectory(prefix="bench-async-") as folder:
            rounds.append(measure(arguments, Path(folder)))
        shown = " ".join(f"{name}={value:.3g}" for name, value in rounds[-1].items())
        print(f"round {number}: {shown}", flush=True)
    medians = {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
    print(" ".join(f"{name}={value:.3g}" for name, value in medians.items()))


if __name__ == "__main__":
    main()
