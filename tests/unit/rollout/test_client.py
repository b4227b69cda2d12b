"""Requests to a server over HTTP, while connections end."""

from __future__ import annotations

import asyncio
import json
import re

from gspo_megatron.rollout.vllm.client import ServerClient, connected_session
from gspo_megatron.rollout.vllm.worker.gspo_vllm_answers import ModelFacts

FACTS = ModelFacts(10, 1, 0, 1, ())
LOGPROBS = {"content": [{"logprob": -0.5}]}
ANSWER = {"choices": [{"token_ids": [7], "logprobs": LOGPROBS, "finish_reason": "stop"}]}


def test_a_connection_that_the_server_closes_while_it_is_idle_costs_no_request() -> None:
    """vLLM closes a connection 5 s after its last answer, even if a request is on its way. Here
    this always happens: the next request on the connection finds its end."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        await reader.readexactly(int(re.findall(r"Content-Length: (\d+)", head)[0]))
        body = json.dumps(ANSWER).encode()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        await reader.read(1)  # a byte of the next request
        writer.close()

    async def ask() -> list[int]:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server, connected_session() as session:
            client, tokens = ServerClient(url, session), []
            for _ in range(3):
                response = await client.generate([1, 2], {}, FACTS, seconds=10, routes=False)
                tokens += response.token_ids.tolist()
            return tokens

    assert asyncio.run(ask()) == [7, 7, 7]
