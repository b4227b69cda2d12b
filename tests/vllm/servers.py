"""A real vLLM server on this machine's CPU, and requests to it."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import http.client
import io
import json
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gspo_megatron.families import preset_of_folder
from gspo_megatron.families.model_shape import shape_of
from gspo_megatron.rollout.vllm.client import MODEL
from gspo_megatron.rollout.vllm.process import (
    ServerProcess,
    common_environment,
    cpu_arguments,
    cpu_environment,
    end_with_parent,
    needed_arguments,
    option_words,
)
from tests.programs import command_environment, wait_until

START_SECONDS = 300  # 9 s on an idle machine
_REQUEST_SECONDS = 120
_TAIL = 3000  # the number of characters of the log in the message of a failure

_ENVIRONMENT = common_environment(token="") | cpu_environment({}) | {"OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Sample:
    """A response: the ids and log-probs of its tokens, and the experts of all tokens that the model
    computed (all except the last one)."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    experts: np.ndarray  # (prompt + response - 1, layers, k) integers


@dataclass(frozen=True)
class Server:
    """A running server. `log` is the file of its output. A refused request raises AssertionError
    with the server's answer."""

    url: str
    log: Path

    def get(self, path: str) -> Any:
        return self._send("GET", path)()

    def post(self, path: str, body: object = None, **query: str) -> Any:
        address = f"{path}?{urllib.parse.urlencode(query)}"
        return self._send("POST", address, {} if body is None else body)()

    def sample(self, prompt: Sequence[int], tokens: int, **parameters: object) -> Sample:
        """Get one response with this number of tokens."""
        return self.start_sample(prompt, tokens, **parameters)()

    def start_sample(
        self, prompt: Sequence[int], tokens: int, **parameters: object
    ) -> Callable[[], Sample]:
        """Send the request of a response. Returns a function that waits for the response."""
        asked = {"max_tokens": tokens, "ignore_eos": True, "logprobs": 0, **parameters}
        body = {"token_ids": list(prompt), "sampling_params": asked}
        answer = self._send("POST", "/inference/v1/generate", body)

        def finish() -> Sample:
            (choice,) = answer()["choices"]
            experts = np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])))
            logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
            return Sample(list(prompt), choice["token_ids"], logprobs, experts)

        return finish

    def call_workers(self, method: str, **arguments: str) -> list[Any]:
        """The results of a method, one for each worker."""
        body = {"method": method, "kwargs": arguments}
        return self.post("/collective_rpc", body)["results"]

    def _send(self, method: str, path: str, body: object = None) -> Callable[[], Any]:
        """Send a request. urllib is not used, because it would use proxies from the environment,
        which do not reach this machine's loopback interface."""
        connection = http.client.HTTPConnection(
            self.url.removeprefix("http://"), timeout=_REQUEST_SECONDS
        )
        connection.request(method, path, json.dumps(body), {"Content-Type": "application/json"})

        def answer() -> Any:
            with contextlib.closing(connection):
                got = connection.getresponse()
                text = got.read().decode(errors="replace")
            assert got.status == 200, f"{path}: {got.status} {text}\n{tail(self.log)}"
            return json.loads(text) if text else None

        return answer


def run_options(model: Path) -> dict[str, Any]:
    """The options with which a run starts a server for a Hugging Face folder in fp32, but without a
    token."""
    return {
        **needed_arguments(str(model), "float32", routes=True),
        **cpu_arguments(shape_of(preset_of_folder(str(model))), workers=1),
        "served_model_name": MODEL,
        "max_model_len": 2048,
        "max_num_seqs": 64,
        "middleware": "gspo_vllm_answers.Answers",
    }


@contextlib.contextmanager
def serve(python: Path, folder: Path, options: Mapping[str, Any]) -> Iterator[Server]:
    """Run a server with these options of vLLM, in the Python of vLLM's environment. Its log goes to
    `folder`. The server ends when this process ends. If the server does not start, raises
    AssertionError with the end of the log."""
    words = [str(python), "-m", "gspo_vllm_server", *option_words(options)]
    process = ServerProcess(words, _ENVIRONMENT, folder / "server.log")
    server = Server(process.url, folder / "server.log")
    try:
        wait_until_healthy(server, process)
        yield server
    finally:
        asyncio.run(process.end())


@contextlib.contextmanager
def served_by_command(
    folder: Path, *words: str, said: str
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Run `gspo-megatron serve` with these words, and wait until its output contains `said`. Yields
    the process and its output. The output goes to `folder`. The server ends when this process
    ends."""
    output, errors = folder / "output", folder / "errors"
    with output.open("wb") as stdout, errors.open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "gspo_megatron", "serve", *words],
            env=command_environment(),
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
        try:
            is_ready = wait_until(lambda: said in output.read_text(), process, START_SECONDS)
            assert is_ready, errors.read_text()[-_TAIL:]
            yield process, output.read_text()
        finally:
            process.kill()


def wait_until_healthy(server: Server, process: ServerProcess) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        with contextlib.suppress(OSError):
            server.get("/health")
            return
        ended = process.has_ended()
        assert ended is None, f"vLLM {ended}\n{tail(server.log)}"
        late = f"vLLM has not started in {START_SECONDS} s\n{tail(server.log)}"
        assert time.monotonic() < deadline, late
        time.sleep(0.2)


def tail(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")[-_TAIL:]
