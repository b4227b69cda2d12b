"""Throughput and peak memory of conversion from and to Hugging Face, compared with `cp`.

    python tools/bench_convert.py [--gigabytes 4] [--rounds 4] [--directory SCRATCH]

`gspo-megatron convert` imports and exports a random qwen3_moe checkpoint of several files (the
widths of Qwen3-30B-A3B, fewer layers and experts). Each direction is compared with `cp -r` of its
source on the same disk, under the same conditions: the source was just read or written, so it is in
the page cache as far as memory allows; `sync` runs before each, so nothing else waits to be
written; the time ends when all files of the result are on the disk. The conversion calls fsync
itself; after `cp`, this script does. The time of `cp` alone, without fsync, is shown, too. Copy and
conversion take turns in being first: the second one reuses memory of the first, and a virtual
machine gives that faster than fresh memory. The last line has the median ratio of all rounds. CPU
time is that of the process alone; on a busy machine it is more reliable than the clock.

Peak memory is the largest resident set of the converting process, from the kernel (wait4). It
includes the interpreter, its libraries, and the pages of mapped files.

The script needs three times the size in scratch space, and removes its files.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

_BLOCK = 1 << 26  # bytes of random bits made at once
_COPIES = 3  # of the checkpoint on the disk at the same time


@dataclass
class Timing:
    """Wall-clock seconds, processor seconds, and the largest resident set in MB."""

    seconds: float
    cpu: float
    peak: float


@dataclass
class Turn:
    """Ratio to the throughput of cp with fsync, to that of cp alone, and the peak in MB."""

    ratio: float
    ratio_alone: float
    peak: float


def config_of(gigabytes: float) -> dict:
    """config.json of a checkpoint of about that size in bf16."""
    vocab_size = int(151_936 * min(1.0, gigabytes / 4))
    layers, hidden, width = 4, 2048, 768
    left = gigabytes * 1e9 - 2 * 2 * vocab_size * hidden
    experts = max(8, round(left / (layers * 3 * 2 * hidden * width)))
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": 6144,
        "moe_intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": experts,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "max_position_embeddings": 40_960,
        "rope_theta": 1_000_000.0,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def make_checkpoint(folder: Path, gigabytes: float) -> None:
    """Write random bits of the published layout.

    Runs in its own process, because a new process inherits the peak memory of its parent.
    """
    import torch

    from gspo_megatron.families import describe, family_of
    from gspo_megatron.families.model_shape import shape_of
    from gspo_megatron.families.weight_map import weight_map
    from gspo_megatron.hf.writer import HfWriter

    config = config_of(gigabytes)
    shape = shape_of(describe(config))
    shapes = weight_map(family_of(config), shape, config["vocab_size"]).shapes
    options = {"dtype": torch.bfloat16, "device": "meta"}
    specs = {name: torch.empty(size, **options) for name, size in shapes.items()}
    total = sum(spec.nbytes for spec in specs.values())
    generator = torch.Generator().manual_seed(1)
    with HfWriter(folder, specs, max_shard_bytes=total // 4 + 1) as writer:
        for name, spec in specs.items():
            rows = max(1, _BLOCK // (spec.nbytes // spec.shape[0]))
            for first in range(0, spec.shape[0], rows):
                block = (min(rows, spec.shape[0] - first), *spec.shape[1:])
                noise = torch.randint(-(2**15), 2**15, block, generator=generator).to(torch.int16)
                slices = [
                    slice(first, first + block[0]),
                    *map(slice, [0] * len(block[1:]), block[1:]),
                ]
                writer.write(name, noise.view(torch.bfloat16), slices)
        writer.finish()
        writer.publish({"config.json": config})


def run(command: list[str]) -> Timing:
    """Run a command to its end; `sync` makes the disk idle before."""
    os.sync()
    started = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    messages = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{messages[-3000:]}")
    seconds = time.perf_counter() - started
    return Timing(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1e3)


def copy(source: Path, destination: Path) -> tuple[Timing, float]:
    """The timing of `cp -r`, and the seconds until its files are on the disk."""
    timing = run(["cp", "-r", str(source), str(destination)])
    started = time.perf_counter()
    for path in [*destination.rglob("*"), destination]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    durable = timing.seconds + time.perf_counter() - started
    shutil.rmtree(destination)
    return timing, durable


def compare(direction: str, source: Path, destination: Path, total: int, copy_first: bool) -> Turn:
    """One turn of both."""
    command = [sys.executable, "-m", "gspo_megatron", "convert", direction]
    command += [str(source), str(destination)]
    beside = source.with_name("copy")
    if copy_first:
        alone, durable = copy(source, beside)
        timing = run(command)
    else:
        timing = run(command)
        alone, durable = copy(source, beside)
    rate = total / 1e9
    ratio, ratio_alone = durable / timing.seconds, alone.seconds / timing.seconds
    print(
        f"  {direction:<15} {rate / timing.seconds:5.2f} GB/s, CPU {timing.cpu:4.1f} s, peak "
        f"{timing.peak:4.0f} MB   cp + fsync {rate / durable:5.2f} GB/s (cp alone "
        f"{rate / alone.seconds:5.2f}, CPU {alone.cpu:4.1f} s)   ratio {ratio:.2f} "
        f"({ratio_alone:.2f})",
        flush=True,
    )
    return Turn(ratio, ratio_alone, timing.peak)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=4.0, help="size of the checkpoint")
    parser.add_argument("--rounds", type=int, default=4, help="turns of cp and conversion")
    parser.add_argument("--directory", type=Path, help="where to write (default: a temporary one)")
    parser.add_argument("--make", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.make is not None:
        make_checkpoint(arguments.make, arguments.gigabytes)
        return
    if arguments.gigabytes <= 0 or arguments.rounds < 1:
        parser.error("--gigabytes must be above 0, --rounds at least 1")
    with tempfile.TemporaryDirectory(dir=arguments.directory, prefix="bench_convert_") as name:
        scratch = Path(name)
        needed = int((_COPIES + 0.1) * arguments.gigabytes * 1e9)
        free = shutil.disk_usage(scratch).free
        if free < needed:
            parser.error(f"{scratch}: {needed:,} bytes needed, {free:,} are free; see --directory")
        hf, ours, back = scratch / "hf", scratch / "ours", scratch / "back"
        make = [sys.executable, __file__, "--make", str(hf)]
        subprocess.run([*make, "--gigabytes", str(arguments.gigabytes)], check=True)
        files = list(hf.glob("*.safetensors"))
        total = sum(file.stat().st_size for file in files)
        print(f"{total / 1e9:.2f} GB in {len(files)} files")
        results: dict[str, list[Turn]] = {"import": [], "export": []}
        for number in range(1, arguments.rounds + 1):
            print(f"round {number}")
            for name, direction, source, result in (
                ("import", "hf-to-megatron", hf, ours),
                ("export", "megatron-to-hf", ours, back),
            ):
                turn = compare(direction, source, result, total, copy_first=number % 2 == 1)
                results[name].append(turn)
            shutil.rmtree(ours)
            shutil.rmtree(back)
    pairs = {}
    for direction, turns in results.items():
        pairs[f"ratio_{direction}"] = f"{statistics.median(turn.ratio for turn in turns):.2f}"
    for direction, turns in results.items():
        pairs[f"peak_{direction}_mb"] = f"{max(turn.peak for turn in turns):.0f}"
    for direction, turns in results.items():
        median = statistics.median(turn.ratio_alone for turn in turns)
        pairs[f"ratio_{direction}_cp_alone"] = f"{median:.2f}"
    print(" ".join(f"{name}={value}" for name, value in pairs.items()))


if __name__ == "__main__":
    main()
