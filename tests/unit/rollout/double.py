"""A program that answers like a vLLM server. A test can also make it give errors that cannot be
provoked in vLLM.

Its model is a formula. A greedy token is a function of all tokens before it. The log-prob of a
token is a function of the token and of the weights version.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import ClientSession, TCPConnector, web

from gspo_megatron.families import FAMILIES, PRESETS
from gspo_megatron.families.model_shape import shape_of
from gspo_megatron.rollout.vllm.checks import Needs
from gspo_megatron.rollout.vllm.client import ServerClient, connected_session
from gspo_megatron.rollout.vllm.server import FleetSettings, Server
from gspo_megatron.rollout.vllm.weight_check import WeightCheck
from gspo_megatron.rollout.vllm.weights import Weights
from gspo_megatron.rollout.vllm.worker.gspo_vllm_answers import Answers, ModelFacts
from tests.fleets import ScheduledFleet
from tools.bench.asgi import handler_of

VOCABULARY, LAYERS, EXPERTS, TOP_K, LENGTH = 50, 3, 8, 2, 64
FACTS = ModelFacts(VOCABULARY, LAYERS, EXPERTS, TOP_K, (1, 2))  # layer 0 has no experts
CONFIG: Mapping[str, Any] = FAMILIES["qwen3_moe"].config(
    shape_of(
        PRESETS["tiny"],
        {"num_layers": LAYERS, "moe_layer_freq": [0, 1, 1], "num_moe_experts": EXPERTS},
    ),
    VOCABULARY,
)  # type: ignore[assignment]

# A function that gets a request and the right answer, and returns the answer that is sent instead.
Fault = Callable[[web.Request, Any], Awaitable[web.StreamResponse]]


def greedy(prompt: Sequence[int], count: int) -> list[int]:
    tokens: list[int] = []
    for _ in range(count):
        tokens.append((sum(prompt) + 3 * sum(tokens) + len(tokens)) % VOCABULARY)
    return tokens


def logprob(token: int, version: str) -> float:
    return -0.1 - (7 * token + 11 * int(version)) % 40 / 10


def experts(tokens: Sequence[int]) -> np.ndarray:
    """The experts [tokens, LAYERS, TOP_K] of each token. Layer 0 has no experts, so its values have
    no meaning."""
    first = (np.array(tokens)[:, None] + np.arange(LAYERS)) % EXPERTS
    chosen = np.stack([first, (first + 3) % EXPERTS], -1)
    chosen[:, 0] = 99
    return chosen


def encoded(array: np.ndarray) -> str:
    """The array in the encoding that vLLM sends."""
    buffer = io.BytesIO()
    np.save(buffer, array)
    return base64.b64encode(buffer.getvalue()).decode()


def weights(folder: Path, version: int) -> Weights:
    """The weights of the trainer. A server that loads their folder has the weights of `version`."""
    place = folder / f"version_{version}"
    place.mkdir(exist_ok=True)
    (place / "config.json").write_text(json.dumps(CONFIG))
    prompts = [[1, 2, 3], [4] * 20]
    tokens = [greedy(prompt, 4) for prompt in prompts]
    logprobs = [[logprob(token, str(version)) for token in response] for response in tokens]
    return Weights(version, str(place), WeightCheck(prompts, tokens, logprobs, 1e-4, 3e-5))


def _version(folder: str) -> str:
    return folder.rpartition("_")[2]


class Double:
    """One server. `faults` maps paths to faults, and may change while the server runs."""

    gives_parts = False  # whether the package's middleware is in front of the server

    def __init__(self) -> None:
        self.faults: dict[str, Fault] = {}
        self.calls: Counter[str] = Counter()
        self.running = self.drawn = 0  # number of requests in progress, and of all tokens so far
        self.names: list[str] = []  # names of the requests, in order; a probe has no name
        # number of tokens of each request in progress, by the request's name
        self.counts: dict[str, int] | None = None
        # The version of the loaded weights, and the version name that the server reports.
        self.loaded, self.named = "0", "default"
        self.model = {
            "logprobs_mode": "processed_logprobs",
            "enable_return_routed_experts": True,
            "dtype": "torch.float32",
            "skip_tokenizer_init": True,
        }
        self.layout = {
            "worker_extension_cls": "gspo_vllm_worker.GspoWorker",
            "world_size": 1,
            "data_parallel_size": 1,
        }
        self.sequences = 256  # number of requests that it processes at the same time
        self.paths = set(_PATHS)  # paths that this server answers
        self.url = ""
        self.connections: list[Any] = []
        self.front_faults: dict[str, Fault] = {}  # faults of the middleware's routes, by path

    @contextlib.asynccontextmanager
    async def serve(self) -> AsyncIterator[Double]:
        async with site(self._handle) as self.url:
            if not self.gives_parts:
                yield self
                return
            async with (
                ClientSession(connector=TCPConnector(limit=0, force_close=True)) as session,
                site(self._counted(handler_of(Answers(_forward(session, self.url))))) as self.url,
            ):
                yield self

    def hang_up(self) -> None:
        """End the connections to the middleware's routes, as if the server had been killed."""
        for connection in self.connections:
            connection.abort()

    def _counted(self, handler: Any) -> Any:
        async def handle(request: web.Request) -> web.StreamResponse:
            if request.path.startswith("/gspo/"):
                self.calls[request.path] += 1
                self.connections.append(request.transport)
                if request.path in self.front_faults:
                    return await self.front_faults[request.path](request, {})
            return await handler(request)

        return handle

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        self.calls[path] += 1
        given = await request.json() if request.can_read_body else {}
        is_draw = path == "/inference/v1/generate"
        self.running += is_draw
        try:
            answer = self._answers(path, given)
            fault = fails(404) if path in _PATHS - self.paths else self.faults.get(path)
            return await (fault or plain)(request, answer)
        finally:
            self.running -= is_draw

    def _answers(self, path: str, given: Mapping[str, Any]) -> Any:
        if path == "/inference/v1/generate":
            self.names += [given["request_id"]] if "request_id" in given else []
            return self._generate(given["token_ids"], given["sampling_params"]["max_tokens"])
        if path == "/collective_rpc":
            return {"results": [self._calls(given["method"], given["kwargs"])]}
        if path == "/update_weight_version":
            self.named = given["new_version"]
        return {
            "/weight_info": {"weight_version": self.named},
            "/v1/models": {"data": [{"max_model_len": LENGTH}]},
            "/openapi.json": {"paths": dict.fromkeys(self.paths)},
            "/server_info": {
                "vllm_config": {
                    "model_config": self.model,
                    "parallel_config": self.layout,
                    "device_config": {"device": "cuda"},
                    "scheduler_config": {"max_num_seqs": self.sequences},
                }
            },
            "/metrics": f"vllm:num_requests_running {float(self.running)}\n"
            f"vllm:generation_tokens_total {float(self.drawn)}\n",
        }.get(path, {})

    def _calls(self, method: str, arguments: Mapping[str, Any]) -> Any:
        """The result of the server's only worker."""
        if method == "reload_weights":
            self.loaded = _version(arguments["weights_path"])
        if method == "response_tokens" and self.counts is not None:
            return {f"generate-tokens-{name}-0a1b2c3d": n for name, n in self.counts.items()}
        if method == "weight_sums":
            folder = arguments["folder"]
            value = float(self.loaded if folder is None else _version(folder)) + 1
            return {f"experts of layer {n}": [1, value, value**2] for n in FACTS.moe_layers}
        return json.dumps(CONFIG) if method == "tell_config" else None

    def _generate(self, prompt: list[int], count: int) -> dict[str, Any]:
        tokens = greedy(prompt, count)
        self.drawn += len(tokens)
        content = [{"logprob": logprob(token, self.loaded)} for token in tokens]
        choice = {
            "token_ids": tokens,
            "logprobs": {"content": content},
            "finish_reason": "length",
            "routed_experts": encoded(experts([*prompt, *tokens][:-1])),
        }
        return {"choices": [choice]}


class Started:
    """Stands for the process of a server that this run has started."""

    def __init__(self, url: str, ended: str | None = None) -> None:
        """ended: how the process has ended; None: it runs."""
        self.url, self.ended = url, ended

    def has_ended(self) -> str | None:
        return self.ended

    def errors(self) -> str:
        return ""

    def kill(self) -> None:
        pass

    async def end(self) -> None:
        pass


def fleet_settings(
    *, with_routes: bool = False, longest: int = LENGTH, **changes: Any
) -> FleetSettings:
    needs = Needs(max_model_len=longest, dtype="float32", with_routes=with_routes)
    limits = {"restarts": 0, "update_seconds": 30, "silence_seconds": 30}
    return FleetSettings(FACTS, needs, **limits | changes)


@contextlib.asynccontextmanager
async def fleet_of_doubles(
    count: int = 1, **settings: Any
) -> AsyncIterator[tuple[ScheduledFleet, list[Double]]]:
    """A fleet of stand-ins, which are called server 0, 1, ... settings: see `fleet_settings`."""
    async with contextlib.AsyncExitStack() as stack:
        doubles = [await stack.enter_async_context(Double().serve()) for _ in range(count)]
        session = await stack.enter_async_context(connected_session())
        servers = [
            Server(f"server {n}", ServerClient(each.url, session)) for n, each in enumerate(doubles)
        ]
        fleet = ScheduledFleet(servers, fleet_settings(**settings))
        yield await stack.enter_async_context(fleet), doubles


async def until(condition: Callable[[], object], seconds: float = 30) -> None:
    """Wait until the condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def site(handler: Any) -> AsyncIterator[str]:
    """Run a server. Yields its URL."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def _forward(session: ClientSession, url: str) -> Any:
    """An ASGI application that forwards requests to another server. If the client disconnects, the
    forwarded request ends, too."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body = (await receive())["body"]

        async def ask() -> None:
            query = scope["query_string"].decode()
            async with session.request(
                scope["method"], f"{url}{scope['path']}?{query}", data=body
            ) as answer:
                content = await answer.read()
                head = {"type": "http.response.start", "status": answer.status, "headers": ()}
                await send(head)
                await send({"type": "http.response.body", "body": content})

        asking = asyncio.create_task(ask())
        leaving = asyncio.create_task(receive())
        await asyncio.wait([asking, leaving], return_when=asyncio.FIRST_COMPLETED)
        leaving.cancel()
        if asking.done():
            asking.result()
        asking.cancel()

    return app


_PATHS = {"/inference/v1/generate", "/server_info", "/collective_rpc", "/update_weight_version"}


# Faults


async def plain(_: web.Request, answer: Any) -> web.StreamResponse:
    return web.Response(text=answer) if isinstance(answer, str) else web.json_response(answer)


def fails(status: int, text: str = "it is\nbroken") -> Fault:
    async def fault(*_: Any) -> web.StreamResponse:
        return web.Response(status=status, text=text)

    return fault


def late(seconds: float) -> Fault:
    async def fault(request: web.Request, answer: Any) -> web.StreamResponse:
        await asyncio.sleep(seconds)
        return await plain(request, answer)

    return fault


async def drops(request: web.Request, _: Any) -> web.StreamResponse:
    """Drop the connection without an answer."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def ends_early(request: web.Request, answer: Any) -> web.StreamResponse:
    """End the connection in the middle of the answer."""
    text = json.dumps(answer).encode()
    response = web.StreamResponse(headers={"Content-Length": str(len(text))})
    await response.prepare(request)
    await response.write(text[: len(text) // 2])
    assert request.transport is not None
    request.transport.close()
    return response


async def cut(_: web.Request, answer: Any) -> web.StreamResponse:
    """Send half of the JSON text as if it were complete."""
    text = json.dumps(answer)
    return web.Response(text=text[: len(text) // 2], content_type="application/json")


def choice_with(**changes: Any) -> Fault:
    """Replace values in a response. If a change is a function, it gets the right value and returns
    the new one."""

    async def fault(request: web.Request, answer: Any) -> web.StreamResponse:
        [choice] = answer["choices"]
        changed = {k: v(choice[k]) if callable(v) else v for k, v in changes.items()}
        return await plain(request, {"choices": [{**choice, **changed}]})

    return fault


def routes_with(change: Callable[[np.ndarray], np.ndarray]) -> Fault:
    """Replace the table of experts."""
    return choice_with(routed_experts=lambda text: encoded(change(decoded(text))))


def decoded(text: str) -> np.ndarray:
    return np.load(io.BytesIO(base64.b64decode(text)))
