"""The step time that a rollout plan says, beside that of a run with a vLLM server.

    python tools/bench_rollout_plan.py --python VLLM_PYTHON [--steps 8] [--slots 16]

A tiny model of random weights, one rank, one server, one thread each. Before and after every step
the server's two speeds are measured: one response alone, and a queue of responses of the run's mean
length, as many at a time as it has slots. The simulation gets the means of both, the lengths of the
step's responses, and the step's own seconds of training and of new weights; it says how long the
server draws. Medians over the steps:

    rollout_ratio   simulated seconds of the rollout / the run's
    step_ratio      the same of the whole step
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
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, here and below

import aiohttp
import yaml

from gspo_megatron.data.toy import write_toy_dataset
from gspo_megatron.estimate.rollout_plan import Server, Setting, simulate
from gspo_megatron.rollout.vllm.client import TOKEN_VARIABLE, Client
from gspo_megatron.rollout.vllm.process import end_with_parent
from gspo_megatron.rollout.vllm.worker.gspo_vllm_answers import ModelFacts

_PACKAGE = (sys.executable, "-m", "gspo_megatron")
_LONGEST = 512  # tokens of a response
_MEAN_LENGTH = 48  # of the responses of these weights


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
    arguments: argparse.Namespace, run: Path
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A server of the run's weights, and its url."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    words = ("serve", str(run), "--python", arguments.python, "--port", str(port))
    words += (f"max_num_seqs={arguments.slots}",)
    server = subprocess.Popen([*_PACKAGE, *words], preexec_fn=end_with_parent)
    try:
        yield server, f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(60)


class Speeds:
    """Measures a server."""

    def __init__(self, url: str, token: str, slots: int) -> None:
        self.url, self.token, self.slots = url, token, slots

    def wait(self, server: subprocess.Popen[bytes]) -> None:
        """Until it answers."""
        while (why := asyncio.run(self._with_client(_why_not_healthy))) is not None:
            assert server.poll() is None, why
            time.sleep(0.5)

    def measure(self) -> tuple[float, float]:
        """Tokens/s of one response alone, and of `slots` together."""
        alone, together = (
            asyncio.run(self._with_client(lambda client, given=given: _draw(client, *given)))
            for given in ((1, 192), (4 * self.slots, _MEAN_LENGTH))
        )
        return alone, together

    async def _with_client(self, call: Callable[[Client], Awaitable[Any]]) -> Any:
        async with aiohttp.ClientSession() as session:
            return await call(Client(self.url, session, self.token))


async def _why_not_healthy(client: Client) -> str | None:
    return await client.why_not_healthy(seconds=5)


async def _draw(client: Client, count: int, length: int) -> float:
    """Tokens/s of so many responses of one length, sent at once."""
    # a seed each, as the run's requests: vLLM then samples row by row
    sampling = {"temperature": 1.0, "max_tokens": length, "ignore_eos": True}
    facts = ModelFacts(1 << 20, 1, 0, 0, ())  # any token is fine
    options: dict[str, Any] = {"seconds": 300, "routes": False}
    start = time.perf_counter()
    await asyncio.gather(
        *(
            client.generate([3, 4, 5], {**sampling, "seed": seed}, facts, **options)
            for seed in range(count)
        )
    )
    return length * count / (time.perf_counter() - start)


def assembled(path: Path) -> Any:
    """The loop of a run, as `gspo-megatron train` builds it."""
    from gspo_megatron.config import check_config
    from gspo_megatron.config.load import load_config
    from gspo_megatron.data.inputs import read_inputs
    from gspo_megatron.objectives import build_objective
    from gspo_megatron.rewards.registry import get_reward
    from gspo_megatron.rl.loop import ReinforcementLoop
    from gspo_megatron.rl.run import assemble

    config = load_config(path)
    check_config(config, 1, for_training=True)
    objective = build_objective(config.objective, config.rollout.max_response_tokens)
    reward = get_reward(config.reward.name, None, config.reward.options, config.reward.workers)
    return ReinforcementLoop(assemble(config, read_inputs(config), reward, objective))


def compare(loop: Any, step: int, speeds: Speeds) -> dict[str, float]:
    """A step of the run, and as it is simulated."""
    kept, roll_out = [], loop.roll_out
    loop.roll_out = lambda number: kept.append(roll_out(number)) or kept[0]
    before = speeds.measure()
    metrics = loop.step(step)
    after = speeds.measure()
    loop.roll_out = roll_out
    whole, rollout, update = (metrics[f"perf/{n}_seconds"] for n in ("step", "rollout", "sync"))
    alone, together = ((x + y) / 2 for x, y in zip(before, after))
    lengths = kept[0].batch.response_lengths.numpy()[None].astype(float)
    setting = Setting(1, 0, whole - rollout - update, update)
    trace = simulate(lengths, Server(alone, together, speeds.slots), setting, 1)
    figures = {
        "step_ratio": trace.ends[0] / whole,
        "rollout_ratio": trace.starts[0] / rollout,
        "step_seconds": whole,
        "rollout_seconds": rollout,
        "update_seconds": update,
        "alone": alone,
        "together": together,
        "tokens": lengths.sum(),
        "longest": lengths.max(),
    }
    print(f"step {step}:", *(f"{name}={value:.3g}" for name, value in figures.items()), flush=True)
    return figures


def measure(arguments: argparse.Namespace, folder: Path) -> list[dict[str, float]]:
    """The figures of each step but the first, in which the server compiles."""
    from gspo_megatron.platform.groups import stop_processes

    write_toy_dataset(folder / "toy", "mixed", train=64, test=8, seed=1)
    # the model for the server, and that is all
    small = write_config(arguments, folder, "start", max_response_tokens=4)
    words = ("train", str(small), "training.steps=1", "checkpoint.interval=1")
    subprocess.run([*_PACKAGE, *words], check=True, preexec_fn=end_with_parent)
    os.environ[TOKEN_VARIABLE] = secrets.token_hex()  # of the server, and for the run
    with serving(arguments, folder / "start") as (process, url):
        speeds = Speeds(url, os.environ[TOKEN_VARIABLE], arguments.slots)
        speeds.wait(process)
        vllm = {"urls": [url], "weight_transport": "disk"}
        loop = assembled(write_config(arguments, folder, "run", engine="vllm", vllm=vllm))
        try:
            loop.collector.source.take_weights(version=0)
            steps = [compare(loop, step, speeds) for step in range(1, arguments.steps + 1)]
        finally:
            loop.collector.close()
            loop.run_components.logger.close()
            stop_processes()
    return steps[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", required=True, help="of an environment that has vLLM")
    parser.add_argument("--steps", type=int, default=8, help="at least 2; the first does not count")
    parser.add_argument("--prompts", type=int, default=16, help="of a step, 8 responses to each")
    parser.add_argument("--slots", type=int, default=16, help="responses at a time")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-rollout-plan-") as folder:
        steps = measure(arguments, Path(folder))
    medians = {name: statistics.median(each[name] for each in steps) for name in steps[0]}
    print(" ".join(f"{name}={value:.3g}" for name, value in medians.items()))


if __name__ == "__main__":
    main()
