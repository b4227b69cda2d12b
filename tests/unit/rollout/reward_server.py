"""A reward model's server in the process of the test. It answers like vLLM. The tests in tests/vllm
use a real server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from aiohttp import web

from gspo_megatron.rollout.teacher import PROBE

Answer = Callable[[dict[str, Any]], Any]


def score_of(ids: list[int]) -> float:
    """Return a made-up score that depends on all tokens and their order."""
    return sum((place + 3) * token for place, token in enumerate(ids)) % 41 / 7 - 3


def right(given: dict[str, Any]) -> dict[str, Any]:
    """Return the right answer to a request to /classify."""
    assert given["model"] == "scorer" and given["use_activation"] is False
    return {
        "data": [
            {"index": place, "label": "LABEL_0", "probs": [score_of(ids)], "num_classes": 1}
            for place, ids in enumerate(given["input"])
        ]
    }


@contextmanager
def served(
    answer: Answer, tokens: list[int], keys: list[str | None] | None = None, longest: int = 4096
) -> Generator[str]:
    """Serve a reward model, and yield its URL. If `answer` raises ConnectionAbortedError, the
    connection is closed. If it raises TimeoutError, there is no answer. Any other error becomes
    status 500. tokens: the answer to the request that tests the tokenizer. keys: a list to which
    the key of each request is added."""

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "scorer", "max_model_len": longest}]})

    async def tokenize(request: web.Request) -> web.Response:
        given = await request.json()
        assert given["prompt"] == PROBE and not given["add_special_tokens"]
        return web.json_response({"tokens": tokens})

    async def classify(request: web.Request) -> web.Response:
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
    application.router.add_post("/classify", classify)
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
