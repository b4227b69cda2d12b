"""A server in the process of the test that answers like a vLLM server of one model. The tests in
tests/vllm use real servers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from aiohttp import web

from gspo_megatron.rollout.asking import PROBE

Answer = Callable[[dict[str, Any]], Any]


def slow(_: dict[str, Any]) -> Any:
    raise TimeoutError


def gone(_: dict[str, Any]) -> Any:
    raise web.HTTPServiceUnavailable(text="shutting down")


def killed(_: dict[str, Any]) -> Any:
    raise ConnectionAbortedError


@contextmanager
def model_server(
    model: dict[str, Any],
    path: str,
    answer: Answer,
    tokens: list[int],
    keys: list[str | None] | None = None,
) -> Generator[str]:
    """Serve `model`, an entry of /v1/models, and yield the URL. `answer` gets the requests to
    `path`. If it raises ConnectionAbortedError, the connection is closed. If it raises
    TimeoutError, there is no answer. Any other error becomes status 500. tokens: the answer to the
    request that tests the tokenizer. keys: a list to which the key of each request is added."""

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [model]})

    async def tokenize(request: web.Request) -> web.Response:
        given = await request.json()
        assert given["prompt"] == PROBE and not given["add_special_tokens"]
        return web.json_response({"tokens": tokens})

    async def respond(request: web.Request) -> web.Response:
        if keys is not None:
            keys.append(request.headers.get("Authorization"))
        try:
            return web.json_response(answer(await request.json()))
        except TimeoutError:
            await asyncio.sleep(3600)
            raise
        except ConnectionAbortedError:  # as if the server had been killed
            assert request.transport is not None
            request.transport.abort()
            raise

    application = web.Application()
    application.router.add_get("/v1/models", models)
    application.router.add_post("/tokenize", tokenize)
    application.router.add_post(path, respond)
    started = threading.Event()
    found: list[Any] = []  # the event loop, the event that ends it, and the port

    async def serve() -> None:
        runner, ended = web.AppRunner(application, shutdown_timeout=0.1), asyncio.Event()
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        found.extend([asyncio.get_running_loop(), ended, runner.addresses[0][1]])
        started.set()
        await ended.wait()
        await runner.cleanup()

    thread = threading.Thread(target=asyncio.run, args=[serve()])
    thread.start()
    assert started.wait(60)
    loop, ended, port = found
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join()
