"""The step time that a rollout plan says, beside that of a run with a vLLM server.

    python tools/bench_rollout_plan.py --python VLLM_PYTHON [--steps 12] [--slots 16]

A tiny model of random weights, one rank, one server, one thread each. The server's two speeds are
measured before and after the run, with responses of one length: one alone, and as many as it has
slots. The run gives the lengths (as `check --rollout-plan --lengths RUN` takes them), and the
medians of training and of new weights. The plan gives the rest: how long the server draws.

    rollout_ratio   seconds of the plan's rollout / the run's (median of its steps but the first)
    step_ratio      the same of a whole step
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, here and below

import aiohttp
import yaml

from gspo_megatron.data.toy import write_toy_dataset
from gspo_megatron.estimate.rollout_plan import Server, Setting, plan, read_lengths
from gspo_megatron.observe.metrics_files import read_metrics, series
from gspo_megatron.rollout.service.client import TOKEN_VARIABLE, Client, ModelFacts
from gspo_megatron.rollout.service.process import end_with_parent

_PACKAGE = (sys.executable, "-m", "gspo_megatron")
_LONGEST = 512  # tokens of a response
_ROUNDS = 3  # of each measurement


def write_config(arguments: argparse.Namespace, folder: Path, name: str, **rollout: Any) -> Path:
    """A run into folder/NAME."""
    config = {
        # heads of 32 channels are the smallest that vLLM's kernels take
        "model": {"megatron": {"kv_channels": 32}, "max_sequence_length": 1024},
        "data": {
            "tokenizer": str(folder / "toy" / "tokenizer.model"),
            "prompts": str(folder / "toy" / "train.jsonl"),
        },
        "rollout": {
            "prompts_per_step": arguments.prompts,
            "group_size": 8,
            "max_response_tokens": _LONGEST,
            **rollout,
        },
        "reward": {"name": "per_character"},
        "objective": {"name": "gspo", "mini_batches": 2},
        "optimizer": {"learning_rate": 1e-6},  # lengths stay as they are
        "training": {"precision": "fp32", "micro_batch_tokens": 4096},
        "logging": {"dir": str(folder / name), "plots": False},
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@contextlib.contextmanager
def serving(
    arguments: argparse.Namespace, run: Path, token: str
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A server of the run's weights, and its url."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    words = ("serve", str(run), "--python", arguments.python, "--port", str(port))
    words += (f"max_num_seqs={arguments.slots}",)
    environ = {**os.environ, TOKEN_VARIABLE: token}
    server = subprocess.Popen([*_PACKAGE, *words], env=environ, preexec_fn=end_with_parent)
    try:
        yield server, f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(60)


async def speeds(
    server: subprocess.Popen[bytes], url: str, token: str, slots: int
) -> tuple[float, float]:
    """Tokens/s of one response alone, and of `slots` at a time together; the medians of some
    rounds. Prints those in between, too."""
    facts = ModelFacts(1 << 20, 1, 0, 0, ())  # any token is fine
    async with aiohttp.ClientSession() as session:
        client = Client(url, session, token)
        deadline = time.monotonic() + 300
        while (why := await client.why_not_healthy(seconds=5)) is not None:
            assert time.monotonic() < deadline and server.poll() is None, why
            await asyncio.sleep(0.5)

        async def draw(count: int) -> float:
            sampling = {"temperature": 1.0, "max_tokens": 256, "ignore_eos": True}
            start = time.perf_counter()
            await asyncio.gather(
                *(
                    client.generate([3, 4, 5], sampling, facts, seconds=300, routes=False)
                    for _ in range(count)
                )
            )
            return 256 * count / (time.perf_counter() - start)

        await draw(slots)  # warm-up
        counts = [1 << power for power in range(slots.bit_length()) if 1 << power < slots]
        rounds = [[await draw(count) for count in (*counts, slots)] for _ in range(_ROUNDS)]
    found = [statistics.median(rates) for rates in zip(*rounds)]
    words = (f"{count}: {rate:.0f}" for count, rate in zip((*counts, slots), found))
    print("tokens/s by responses at a time:", *words, flush=True)
    return found[0], found[-1]


def gspo(*words: object, **environ: str) -> None:
    """A command of the package, which must succeed."""
    command = [*_PACKAGE, *map(str, words)]
    subprocess.run(command, env={**os.environ, **environ}, check=True, preexec_fn=end_with_parent)


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, float]:
    """The figures of the last line."""
    write_toy_dataset(folder / "toy", "mixed", train=64, test=8, seed=1)
    # the weights for the server, and that is all
    small = write_config(arguments, folder, "start", max_response_tokens=4)
    gspo("train", small, "training.steps=1", "checkpoint.interval=1")
    token = secrets.token_hex()
    with serving(arguments, folder / "start", token) as (process, url):
        found = [asyncio.run(speeds(process, url, token, arguments.slots))]
        vllm = {"urls": [url], "weight_transport": "disk"}
        config = write_config(arguments, folder, "run", engine="vllm", vllm=vllm)
        gspo("train", config, f"training.steps={arguments.steps}", **{TOKEN_VARIABLE: token})
        found.append(asyncio.run(speeds(process, url, token, arguments.slots)))
    records = read_metrics(folder / "run")
    step, rollout, update = (
        statistics.median(series(records, f"perf/{name}_seconds")[1][1:])
        for name in ("step", "rollout", "sync")
    )
    lengths = read_lengths(str(folder / "run"), _LONGEST)
    alone, together = (statistics.fmean(values) for values in zip(*found))
    server = Server(alone, together, arguments.slots)
    [planned] = plan(
        lengths, arguments.prompts * 8, server, [Setting(1, 0, step - rollout - update, update)]
    )
    return {
        "step_ratio": planned.step_seconds / step,
        "rollout_ratio": planned.trainer_idle * planned.step_seconds / rollout,
        "step_seconds": step,
        "rollout_seconds": rollout,
        "update_seconds": update,
        "trainer_idle": rollout / step,
        "planned_trainer_idle": planned.trainer_idle,
        "length_mean": float(lengths.mean()),
        "length_max": float(lengths.max()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", required=True, help="of an environment that has vLLM")
    parser.add_argument("--steps", type=int, default=12, help="at least 2")
    parser.add_argument("--prompts", type=int, default=16, help="of a step, 8 responses to each")
    parser.add_argument("--slots", type=int, default=16, help="responses at a time")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-rollout-plan-") as folder:
        figures = measure(arguments, Path(folder))
    print(" ".join(f"{name}={value:.3g}" for name, value in figures.items()))


if __name__ == "__main__":
    main()
