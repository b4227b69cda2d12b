"""Measures CPU time and memory of the rollout service with simulated servers.

    python tools/bench/service.py [--servers 64] [--groups 256] [--draws 4] [--lengths 2000,6000]
                                  [--speed 0] [--json]

The service is real: client, scheduler, requests, scoring, store. The simulated servers share one
process; each has its own port. A server is our middleware, as vLLM's servers load it, around an
application that answers in vLLM's format. The lengths of responses are log-normal (`--lengths`:
median, 90th percentile), up to 32,768 tokens. Real servers parse vLLM's JSON in parallel. Here,
each of 128 different responses is parsed only once, so that the simulated servers keep up. The
servers answer at once, or at `--speed` tokens a second for each response. With `--json` the servers
have no middleware. All responses of a draw are requested together; as many are in flight as servers
accept. The output has the CPU time of a response for each thread. The last line has

    responses_per_cpu_second   for the CPU time of the service's thread: requests, answers, draws
    core_percent               share of a core that this thread needs for 1,000 responses/s
    scoring_percent            the same for the main thread: it puts groups together, decodes them,
                               calls the reward and writes the record
    process_percent            the same for the whole process, including the kernel's work
    peak_mb                    largest memory of the process
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import resource
import sys
import tempfile
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from aiohttp import web

from gspo_megatron.config.load import load_config
from gspo_megatron.data.inputs import read_inputs
from gspo_megatron.data.toy import write_toy_dataset
from gspo_megatron.families import FAMILIES, PRESETS
from gspo_megatron.families.model_shape import shape_of
from gspo_megatron.rollout.engine import RolloutRequest, Sampling
from gspo_megatron.rollout.vllm.checks import Needs
from gspo_megatron.rollout.vllm.client import ServerClient, connected_session
from gspo_megatron.rollout.vllm.episodes import Scorers, ServedRequests
from gspo_megatron.rollout.vllm.fleet import Fleet
from gspo_megatron.rollout.vllm.scheduler import Scheduler
from gspo_megatron.rollout.vllm.server import FleetSettings, Server
from gspo_megatron.rollout.vllm.service import collect_garbage_less_often
from gspo_megatron.rollout.vllm.weight_check import WeightCheck
from gspo_megatron.rollout.vllm.weights import Weights
from gspo_megatron.rollout.vllm.worker import gspo_vllm_answers
from gspo_megatron.rollout.vllm.worker.gspo_vllm_answers import (
    ABOUT,
    GENERATE,
    Answers,
    ModelFacts,
    Response,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tools.bench.asgi import handler_of

_LONGEST, _VOCABULARY = 32_768, 40
_BODIES = 128  # number of different responses
_PER_PROMPT = 16
_NINETIETH = 1.2816  # 90th percentile of a normal distribution, in standard deviations
_CHECK = WeightCheck([[1, 2]], [[1, 1]], [[-0.5, -0.5]], 1e-4, 1e-4)


def body(lengths: int, rng: np.random.Generator | None) -> bytes:
    """Return a response in vLLM's format: a random one, or without `rng` the answer to `_CHECK`."""
    if rng is None:
        ids, logprobs = [1] * lengths, [-0.5] * lengths
    else:
        ids = rng.integers(3, _VOCABULARY, lengths).tolist()
        logprobs = (-rng.exponential(0.5, lengths)).tolist()
    named = [
        {"token": f"token_id:{n}", "logprob": x, "bytes": None}
        for n, x in zip(ids, logprobs, strict=True)
    ]
    content = [{**each, "top_logprobs": [each]} for each in named]  # the sampled token comes twice
    choice = {
        "index": 0,
        "logprobs": {"content": content},
        "finish_reason": "stop",
        "token_ids": ids,
    }
    answer = {"request_id": "0" * 32, "choices": [choice]}
    return json.dumps(answer, separators=(",", ":")).encode()


def median_and_ninetieth(text: str) -> tuple[float, float]:
    """Read the value of --lengths. Raises argparse's error."""
    try:
        median, ninetieth = map(float, text.split(","))
    except ValueError:
        median = ninetieth = 0.0
    if not 0 < median <= ninetieth < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not MEDIAN,P90 with 0 < MEDIAN <= P90")
    return median, ninetieth


def simulated(bodies: list[bytes], lengths: list[int], probe: bytes, speed: float) -> Any:
    """Return an ASGI application that answers like a vLLM server. The weight check gets `probe`."""
    paths = (GENERATE, "/server_info", "/collective_rpc", "/update_weight_version")
    fixed: dict[str, Any] = {
        "/weight_info": {"weight_version": "0"},
        "/v1/models": {"data": [{"max_model_len": 2 * _LONGEST}]},
        "/openapi.json": {"paths": dict.fromkeys(paths)},
        "/collective_rpc": {"results": [None]},
        "/server_info": {
            "vllm_config": {
                "model_config": {
                    "logprobs_mode": "processed_logprobs",
                    "dtype": "torch.float32",
                    "skip_tokenizer_init": True,
                },
                "parallel_config": {"world_size": 1, "data_parallel_size": 1},
                "device_config": {"device": "cuda"},
            }
        },
    }

    async def app(scope: Any, receive: Any, send: Any) -> None:
        content, status = json.dumps(fixed.get(scope["path"], {})).encode(), 200
        if scope["path"] == GENERATE:
            seed = json.loads((await receive())["body"])["sampling_params"].get("seed")
            content = probe if seed is None else bodies[seed % _BODIES]
            if seed is not None and speed:
                await asyncio.sleep(lengths[seed % _BODIES] / speed)
        elif scope["path"] == ABOUT:
            status = 404  # as a server without our middleware answers
        await send({"type": "http.response.start", "status": status, "headers": ()})
        await send({"type": "http.response.body", "body": content})

    return app


def serve(arguments: argparse.Namespace, told: Connection) -> None:
    """Run all servers until the process is ended. Sends their ports and the mean length to
    `told`."""
    rng = np.random.default_rng(0)
    median, ninetieth = arguments.lengths
    deviation = np.log(ninetieth / median) / _NINETIETH
    lengths = np.exp(rng.normal(np.log(median), deviation, _BODIES))
    lengths = np.clip(lengths, 1, _LONGEST).astype(int).tolist()
    bodies = [body(n, rng) for n in lengths]

    read, known = gspo_vllm_answers.read_answer, {}

    def read_once(text: bytes, *arguments: Any, routes: bool) -> Response:
        key = hash(text)
        if key not in known:
            known[key] = read(text, *arguments, routes=routes)
        return known[key]

    gspo_vllm_answers.read_answer = read_once

    async def run() -> None:
        ports = []
        for _ in range(arguments.servers):
            app = simulated(bodies, lengths, body(2, None), arguments.speed)
            site = web.Application(client_max_size=1 << 30)
            site.router.add_route(
                "*", "/{path:.*}", handler_of(app if arguments.json else Answers(app))
            )
            runner = web.AppRunner(site, access_log=None, handler_cancellation=True)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
            ports.append(runner.addresses[0][1])
        told.send((ports, float(np.mean(lengths))))
        await asyncio.Event().wait()

    asyncio.run(run())


def write_config(folder: Path, groups: int) -> Path:
    write_toy_dataset(folder / "toy", "mixed", train=groups, test=2, seed=1)
    content = {
        "data": {
            "tokenizer": str(folder / "toy" / "tokenizer.model"),
            "prompts": str(folder / "toy" / "train.jsonl"),
        },
        "rollout": {"engine": "vllm", "vllm": {"servers": 1}},
        "logging": {"dir": str(folder / "run")},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(content))
    hf_config = FAMILIES["qwen3_moe"].config(shape_of(PRESETS["tiny"], {}), _VOCABULARY)
    (folder / "config.json").write_text(json.dumps(hf_config))
    return folder / "config.yaml"


async def draw_all(scheduler: Scheduler, draws: ServedRequests, step: int, groups: int) -> float:
    """Request responses to `groups` prompts. Returns the CPU seconds of this thread."""
    seconds = time.thread_time()
    running = draws.begin(
        RolloutRequest(
            name=f"step_{step:08d}_0",
            key="data.prompts",
            rows=list(range(groups)),
            first=0,
            per_prompt=_PER_PROMPT,
            sampling=Sampling(_LONGEST),
            seed=1,
            version=0,
        )
    )
    assert running.task is not None
    await running.task
    if running.error is not None:
        raise running.error
    assert scheduler.resubmitted == 0, "servers were lost"
    return time.thread_time() - seconds


def measure(folder: Path, ports: list[int], arguments: argparse.Namespace) -> tuple[float, float]:
    """Return the CPU seconds of the service's thread, and of the thread that scores."""
    config = load_config(write_config(folder, arguments.groups), ())
    scorers = Scorers(config, inputs := read_inputs(config))
    found: list[float] = []

    async def run() -> None:
        async with connected_session() as session:
            needs = Needs(2 * _LONGEST, "float32", with_routes=False)
            settings = FleetSettings(
                ModelFacts(_VOCABULARY, 2, 4, 2, (0, 1)), needs, 0, 60, 600, max_staleness=1
            )
            urls = [f"http://127.0.0.1:{port}" for port in ports]
            fleet = Fleet([Server(url, ServerClient(url, session)) for url in urls], settings)
            scheduler = Scheduler(fleet)
            try:
                fleet.take_weights(Weights(0, str(folder), _CHECK))
                await fleet.update_servers()
                draws = ServedRequests(
                    scheduler, scorers, inputs.files, {}, folder / "bank", "bench"
                )
                for step in range(1, arguments.draws + 1):
                    found.append(await draw_all(scheduler, draws, step, arguments.groups))
            finally:
                await fleet.close()

    def work() -> None:
        try:
            asyncio.run(run())
        finally:
            scorers.stop()

    thread = threading.Thread(target=work)
    thread.start()
    seconds = time.thread_time()
    scorers.work()
    scoring = time.thread_time() - seconds
    thread.join()
    return sum(found), scoring


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--servers", type=int, default=64)
    parser.add_argument("--groups", type=int, default=256, help=f"of {_PER_PROMPT} responses")
    parser.add_argument("--draws", type=int, default=4, help="one after the other")
    parser.add_argument(
        "--lengths",
        type=median_and_ninetieth,
        default="2000,6000",
        help="median,90th percentile",
    )
    parser.add_argument("--speed", type=float, default=0.0, help="tokens/s of a response")
    parser.add_argument("--json", action="store_true", help="servers without our middleware")
    arguments = parser.parse_args()
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=serve, args=(arguments, theirs), daemon=True
    )
    process.start()
    theirs.close()  # so that the next line ends if the servers' process has died
    ports, mean = ours.recv()
    collect_garbage_less_often()
    used = resource.getrusage(resource.RUSAGE_SELF)
    before, process_seconds = used.ru_maxrss, used.ru_utime + used.ru_stime
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        start = time.perf_counter()
        service, scoring = measure(Path(folder), ports, arguments)
        wall = time.perf_counter() - start
    used = resource.getrusage(resource.RUSAGE_SELF)
    process_seconds = used.ru_utime + used.ru_stime - process_seconds
    process.terminate()
    process.join()
    count = arguments.draws * arguments.groups * _PER_PROMPT
    peak = used.ru_maxrss
    print(f"{count:,} responses of {mean:,.0f} tokens from {len(ports)} servers in {wall:.1f} s")
    each, scored = 1e3 * service / count, 1e3 * scoring / count
    print(f"CPU a response: {each:.2f} ms service, {scored:.2f} ms scoring")
    print(f"memory: {before / 1024:.0f} MB before, {peak / 1024:.0f} MB at most")
    print(
        f"responses_per_cpu_second={count / service:.1f} core_percent={1e5 * service / count:.1f} "
        f"scoring_percent={1e5 * scoring / count:.1f} "
        f"process_percent={1e5 * process_seconds / count:.1f} peak_mb={peak / 1024:.0f}"
    )


if __name__ == "__main__":
    main()
