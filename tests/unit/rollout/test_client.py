"""Requests to a server over HTTP, while connections are closed."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest

from gspo_megatron.rollout.vllm.client import (
    ServerClient,
    ServerGone,
    ServerRefused,
    connected_session,
)
from gspo_megatron.rollout.vllm.worker.gspo_vllm_answers import GroupPart, ModelFacts

FACTS = ModelFacts(10, 1, 0, 1, ())
LOGPROBS = {"content": [{"logprob": -0.5}]}
ANSWER = {"choices": [{"token_ids": [7], "logprobs": LOGPROBS, "finish_reason": "stop"}]}


def test_a_connection_that_the_server_closes_while_it_is_idle_costs_no_request() -> None:
    """vLLM closes a connection 5 s after its last answer, even if the next request is on its way.
    The server of this test always closes the connection when the next request arrives."""

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
                response = await client.generate(GroupPart([1, 2], {}, FACTS, False), seconds=10)
                tokens += response.token_ids.tolist()
            return tokens

    assert asyncio.run(ask()) == [7, 7, 7]


async def leaves(reader: asyncio.StreamReader, seconds: float) -> bool:
    """Wait before an answer. Returns whether the client gives up meanwhile."""
    try:
        return not await asyncio.wait_for(reader.read(1), seconds)
    except asyncio.TimeoutError:
        return False


def with_server(
    answer: Callable[[str], bytes | None],
    use: Callable[[ServerClient], Awaitable[object]],
    late: Callable[[str], float] = lambda path: 0.0,
) -> Counter[str]:
    """Call `use` with the client of a server that gives the answer for each path, after the seconds
    `late`. If the answer is None, the server closes the connection. Returns the number of requests
    for each path."""
    asked = Counter[str]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                if length := re.findall(r"Content-Length: (\d+)", head):
                    await reader.readexactly(int(length[0]))
                path = head.split()[1].partition("?")[0]
                asked[path] += 1
                if late(path) and await leaves(reader, late(path)):
                    break
                if (given := answer(path)) is None:
                    break
                writer.write(given)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        writer.close()

    async def work() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server, connected_session() as session:
            await use(ServerClient(url, session))

    asyncio.run(work())
    return asked


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
REFUSED = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 9\r\n\r\nno folder"
LOAD = {"seconds": 10, "packs_again": False}


def test_a_lost_answer_is_no_reason_to_load_weights_twice() -> None:
    """The workers may still load the weights. The client repeats only requests that do no harm if
    the server gets them twice."""

    async def load(client: ServerClient) -> None:
        with pytest.raises(ServerGone, match="/collective_rpc: Server disconnected"):
            await client.load_weights("folder", "1", **LOAD)
        with pytest.raises(ServerGone, match="/v1/load_lora_adapter: "):
            await client.load_adapter("policy-1", "folder", seconds=10)
        with pytest.raises(ServerGone, match="/tokenize: "):
            await client.tokenize("a", seconds=10)

    lost = {"/collective_rpc", "/v1/load_lora_adapter", "/tokenize"}
    asked = with_server(lambda path: None if path in lost else OK, load)
    assert asked == {
        "/pause": 1,
        "/collective_rpc": 1,
        "/resume": 1,
        "/v1/load_lora_adapter": 1,
        "/tokenize": 2,
    }


def test_a_server_that_does_not_resume_either_tells_what_went_wrong_first() -> None:
    async def load(client: ServerClient) -> None:
        with pytest.raises(ServerRefused, match="/collective_rpc: HTTP 400: no folder"):
            await client.load_weights("folder", "1", **LOAD)

    answers = {"/collective_rpc": REFUSED, "/resume": None}
    assert with_server(lambda path: answers.get(path, OK), load)["/resume"] == 2

    async def resumes_not(client: ServerClient) -> None:
        with pytest.raises(ServerGone, match="/resume: "):
            await client.load_weights("folder", "1", **LOAD)

    with_server(lambda path: None if path == "/resume" else OK, resumes_not)


def test_all_calls_of_an_update_have_one_deadline() -> None:
    """Each of the five calls by itself takes less time than the update may take."""

    async def load(client: ServerClient) -> None:
        with pytest.raises(ServerGone, match=r": no answer within 0\.\d+ s"):
            await client.load_weights("folder", "1", seconds=0.5, packs_again=False)

    with_server(lambda _: OK, load, late=lambda path: 0.2)


def test_a_server_that_hangs_after_a_failure_gets_little_time_to_resume(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gspo_megatron.rollout.vllm.client._TO_RESUME", 0.2)

    async def load(client: ServerClient) -> None:
        start = time.monotonic()
        with pytest.raises(ServerRefused, match="/collective_rpc: HTTP 400: no folder"):
            await client.load_weights("folder", "1", seconds=60, packs_again=False)
        assert time.monotonic() - start < 20

    answers = {"/collective_rpc": REFUSED}
    asked = with_server(
        lambda path: answers.get(path, OK), load, late=lambda path: 60.0 * (path == "/resume")
    )
    assert asked["/resume"] == 1
