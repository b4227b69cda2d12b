"""Our servers return the experts of each token to the run. Their answers to chat clients leave the
experts out."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from gspo_megatron.rollout.vllm.worker.gspo_vllm_answers import GENERATE, Answers

ROUTES = "UEsDBA" * 5000
CHOICE = {"index": 0, "message": {"content": 'the text "routed_experts"'}, "routed_experts": ROUTES}
ANSWER = json.dumps({"id": "a", "choices": [CHOICE, {"index": 1, "routed_experts": None}]}).encode()


def answered(path: str, kind: bytes, parts: list[bytes]) -> tuple[dict[bytes, bytes], list[bytes]]:
    """The headers of the answer that a client gets, and its pieces, if the server sends the pieces
    `parts`."""
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        length = [(b"content-length", b"%d" % sum(map(len, parts)))]
        headers = [(b"content-type", kind), *([] if b"stream" in kind else length)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for number, part in enumerate(parts, 1):
            more = number < len(parts)
            await send({"type": "http.response.body", "body": part, "more_body": more})

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("nothing is read here")

    scope = {"type": "http", "path": path, "headers": []}
    asyncio.run(Answers(app)(scope, receive, send))
    assert [message.get("more_body", False) for message in sent[1:]][-1] is False
    return dict(sent[0]["headers"]), [message["body"] for message in sent[1:]]


@pytest.mark.parametrize("cut", [len(ANSWER), 100])
def test_an_answer_has_everything_but_the_experts(cut: int) -> None:
    parts = [ANSWER[:cut], ANSWER[cut:]]
    headers, bodies = answered("/v1/chat/completions", b"application/json", parts)
    body = b"".join(bodies)
    choices = [{k: v for k, v in CHOICE.items() if k != "routed_experts"}, {"index": 1}]
    assert json.loads(body) == {"id": "a", "choices": choices}
    assert int(headers[b"content-length"]) == len(body) < 300


@pytest.mark.parametrize("cut", [1, 7, 500, 100_000])
def test_a_stream_has_everything_but_the_experts(cut: int) -> None:
    """A piece of the stream may end anywhere."""
    first = b'data: {"choices": [{"delta": {"content": "x"}}]}'
    stream = first + b"\n\ndata: " + ANSWER + b"\n\ndata: [DONE]\n\n"
    pieces = [stream[start : start + cut] for start in range(0, len(stream), cut)]
    _, bodies = answered("/v1/completions", b"text/event-stream; charset=utf-8", pieces)
    events = b"".join(bodies).split(b"\n\n")
    assert events[0] == first and events[2:] == [b"data: [DONE]", b""]
    last = json.loads(events[1].removeprefix(b"data: "))
    assert last["choices"][0] == {"index": 0, "message": CHOICE["message"]}


@pytest.mark.parametrize(
    ("path", "kind", "content"),
    [
        (GENERATE, b"application/json", ANSWER),  # the run's own client asks for the experts
        ("/v1/models", b"application/json", b'{"data": [{"id": "m"}]}'),
        ("/v1/chat/completions", b"application/json", b'{"error": "\\"routed_experts\\""}'),
        ("/v1/chat/completions", b"application/json", b'no JSON: "routed_experts"'),
        ("/v1/audio", b"audio/wav", b'RIFF "routed_experts"'),
    ],
)
def test_what_has_no_experts_and_what_a_run_asks_for_stays(
    path: str, kind: bytes, content: bytes
) -> None:
    _, bodies = answered(path, kind, [content])
    assert b"".join(bodies) == content
