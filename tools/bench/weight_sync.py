"""Measures how long new weights take from the trainer to a vLLM server.

    python tools/bench/weight_sync.py --python VLLM_PYTHON [--gigabytes 1] [--rounds 5]

One rank holds a random Qwen3-MoE-shaped model; one server on the same machine has its weights. Each
round changes all weights and calls ServedRollouts.take_weights, as a run does after each step. The
trainer writes a Hugging Face folder. The server is paused, loads the folder, clears its prefix
cache and continues. Then its answers to 23 prompts are compared with the trainer's own. The
measured time is that of the whole call, so it includes all these parts.

This time is compared with the time of `cp -r` of the same folder to the same file system, in the
same round. Call and `cp` take turns in going first. `cp` calls no fsync, and nothing is read from a
disk: the folder was just written, so it is in memory. `ratio` is the seconds of `cp` / the seconds
of the call: 1 would be as fast as one copy. The call makes several copies: from the trainer to the
folder, from there into vLLM's buffers, on a CPU into the layout of its kernels, and into the
tensors that the kernels use.

    export   write the folder                    expected   compute the trainer's own answers
    load     the server is paused                check      get and compare the server's answers

The goal is a ratio of at least 0.3.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: the cores are shared

_LAYERS, _HIDDEN, _WIDTH, _VOCABULARY = 8, 512, 512, 8192
PARTS = ("export", "expected", "load", "check")


def model_section(gigabytes: float, precision: str) -> dict[str, Any]:
    """Return the section `model` of the configuration. The sizes suit vLLM's kernels for CPUs:
    heads of 32, 64 or 128 channels, and a hidden size that is a multiple of 32."""
    parameters = gigabytes * 1e9 / {"fp32": 4, "bf16": 2}[precision]
    others = 2 * _VOCABULARY * _HIDDEN + _LAYERS * 3 * _HIDDEN**2
    experts = max(4, round((parameters - others) / (_LAYERS * 3 * _HIDDEN * _WIDTH)))
    return {
        "vocab_size": _VOCABULARY,
        "megatron": {
            "num_layers": _LAYERS,
            "hidden_size": _HIDDEN,
            "num_attention_heads": 8,
            "num_query_groups": 4,
            "kv_channels": 64,
            "moe_ffn_hidden_size": _WIDTH,
            "num_moe_experts": experts,
            "moe_router_topk": 4,
        },
    }


def assemble_run(arguments: argparse.Namespace, folder: Path) -> Any:
    """Build the parts of a run, as `gspo-megatron train` does."""
    from gspo_megatron.config import check_config, parse_config
    from gspo_megatron.data.toy import write_toy_dataset
    from gspo_megatron.rl.run import assemble, read_parts

    write_toy_dataset(folder / "toy", "mixed", train=8, test=8, seed=1)
    vllm = {"servers": 1, "python": str(arguments.python), "options": {"max_num_seqs": 16}}
    if arguments.directory is not None:
        vllm["weights_dir"] = str(arguments.directory)
    config = parse_config(
        {
            "model": model_section(arguments.gigabytes, arguments.precision),
            "data": {
                "tokenizer": str(folder / "toy" / "tokenizer.model"),
                "prompts": str(folder / "toy" / "train.jsonl"),
            },
            "rollout": {"engine": "vllm", "max_response_tokens": 8, "vllm": vllm},
            "reward": {"name": "per_character"},
            "objective": {"name": "gspo"},
            "training": {"precision": arguments.precision},
            "logging": {"dir": str(folder / "run"), "plots": False},
        }
    )
    check_config(config, 1, for_training=True)
    return assemble(config, *read_parts(config))


class Parts:
    """Measures the seconds of the parts of a call, by name."""

    def __init__(self, collector: Any) -> None:
        from gspo_megatron.rollout.vllm import weight_sync

        self.seconds: dict[str, float] = {}
        weight_sync.export_hf = self._timed("export", weight_sync.export_hf)
        sync = collector.sync
        sync._weight_check = self._timed("expected", sync._weight_check)

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*given: Any, **named: Any) -> Any:
            start = time.perf_counter()
            result = call(*given, **named)
            self.seconds[name] = time.perf_counter() - start
            return result

        return timed


def copy(folder: Path, to: Path) -> float:
    """Return the seconds of `cp -r`."""
    start = time.perf_counter()
    subprocess.run(["cp", "-r", str(folder), str(to)], check=True)
    seconds = time.perf_counter() - start
    shutil.rmtree(to)
    return seconds


@contextlib.contextmanager
def running(arguments: argparse.Namespace, folder: Path) -> Iterator[Any]:
    """Yield the run with its server, which has the first weights."""
    from gspo_megatron.platform.groups import stop_processes

    run = assemble_run(arguments, folder)
    try:
        start = time.perf_counter()
        run.collector.source.take_weights(0)
        print(f"first weights, with the start of the server: {time.perf_counter() - start:.1f} s")
        yield run
    finally:
        run.collector.close()
        run.logger.close()
        stop_processes()


def measure(arguments: argparse.Namespace, folder: Path) -> list[dict[str, float]]:
    """Return the figures of each round: seconds, bytes, and the ratio."""
    import torch

    from gspo_megatron.rollout.vllm.weights_folder import weights_folders

    with running(arguments, folder) as run:
        parts, rounds = Parts(run.collector.source), []
        parameters = [p for model in run.policy.models for p in model.parameters()]
        total = sum(p.nbytes for p in parameters)
        layer = (total - 2 * _VOCABULARY * _HIDDEN * parameters[0].itemsize) / _LAYERS
        [place] = weights_folders(run.config)
        print(f"{total / 1e9:.3f} GB, {layer / 1e6:.0f} MB a layer, disk: {place.parent}")
        for number in range(1, arguments.rounds + 1):
            with torch.no_grad():
                for parameter in parameters:
                    parameter.add_(parameter, alpha=0.01 * (-1) ** number)
            newest = place / f"version_{number - 1:08d}"
            cp = copy(newest, place.with_suffix(".copy")) if number % 2 else 0.0
            metrics = run.collector.source.take_weights(number)
            newest = place / f"version_{number:08d}"
            cp = cp or copy(newest, place.with_suffix(".copy"))
            figures = run.collector.source._service().figures()
            seconds = parts.seconds | {n: figures[f"{n}_seconds"] for n in ("load", "check")}
            figures = {
                "ratio": cp / metrics["sync/seconds"],
                "seconds": metrics["sync/seconds"],
                "cp_seconds": cp,
                **{f"{name}_seconds": seconds[name] for name in PARTS},
            }
            rounds.append(figures)
            shown = " ".join(f"{name}={value:.2f}" for name, value in figures.items())
            print(f"round {number}: {shown}", flush=True)
        extra = {"bytes": metrics["sync/bytes"], "layer_mb": layer / 1e6}
        return [{**figures, **extra} for figures in rounds]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", type=Path, required=True, help="of an environment with vLLM")
    parser.add_argument("--gigabytes", type=float, default=1.0, help="size of the weights")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, help="rollout.vllm.weights_dir")
    arguments = parser.parse_args()
    if arguments.gigabytes <= 0 or arguments.rounds < 1:
        parser.error("--gigabytes must be above 0, --rounds at least 1")
    with tempfile.TemporaryDirectory(prefix="bench_weight_sync_") as name:
        rounds = measure(arguments, Path(name))
    medians = {key: statistics.median(figures[key] for figures in rounds) for key in rounds[0]}
    print(" ".join(f"{name}={value:.2f}" for name, value in medians.items()))


if __name__ == "__main__":
    main()
