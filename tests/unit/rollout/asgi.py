"""Runs an ASGI application in aiohttp. Simulated servers use this in place of uvicorn, which vLLM
uses."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web


def handler_of(app: Any) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """Return a handler for all paths. The application's runner must have `handler_cancellation`, so
    that aiohttp cancels the handler when the client disconnects."""

    async def handle(request: web.Request) -> web.StreamResponse:
        body, left = [await request.read()], asyncio.Event()
        response = web.StreamResponse()

        async def receive() -> dict[str, Any]:
            if body:
                return {"type": "http.request", "body": body.pop(), "more_body": False}
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            if left.is_set() or request.transport is None or request.transport.is_closing():
                return
            if message["type"] == "http.response.start":
                response.set_status(message["status"])
                for name, value in message.get("headers", ()):
                    response.headers[name.decode()] = value.decode()
                await response.prepare(request)
            elif message.get("body"):
                await response.write(message["body"])

        scope = {
            "type": "http",
            "method": request.method,
            "path": request.path,
            "raw_path": request.path.encode(),
            "query_string": request.query_string.encode(),
            "headers": [(k.lower().encode(), v.encode()) for k, v in request.headers.items()],
        }
        work = asyncio.ensure_future(app(scope, receive, send))
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            left.set()
            await work
            raise
        return response

    return handle
