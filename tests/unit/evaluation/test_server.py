"""Suites on an OpenAI-compatible server. The tests run a real HTTP server with made-up answers."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web

from gspo_megatron.cli.main import main
from gspo_megatron.errors import RolloutError
from gspo_megatron.evaluation import server

ROWS = [{"question": "6 * 7", "solution": "42"}, {"question": "1 / 2", "solution": "0.5"}]


class Chat:
    """Answers every second request of a problem with the right sum in a LaTeX box, and the others
    with a wrong number."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.requests: list[dict[str, Any]] = []
        self.failures = [503, 429]  # the statuses of the first responses
        self.refuses = False
        self.most = 10**9  # after so many answers it refuses
        self.says: str | bytes | None = None  # the body of all responses, if it is set
        self.url = ""

    async def complete(self, request: web.Request) -> web.Response:
        if self.failures:
            return web.Response(status=self.failures.pop(), text="busy")
        if self.refuses or len(self.requests) >= self.most:
            return web.Response(status=400, text="no such sampling")
        if self.says is not None:
            return web.Response(body=self.says, content_type="application/json", charset="utf-9")
        given = await request.json()
        given["key"] = request.headers.get("Authorization")
        self.requests.append(given)
        (message,) = given["messages"]
        text = message["content"]
        answer = "42" if "6 * 7" in text else r"\frac12"
        content = answer if given["seed"] % 2 == 0 else "7"
        choice = {"message": {"content": rf"so \boxed{{{content}}}"}, "finish_reason": "stop"}
        if given["seed"] == 3:
            choice = {"message": {"content": None}, "finish_reason": "length"}
        usage = {"completion_tokens": 5 + given["seed"]}
        return web.json_response({"choices": [choice], "usage": usage})

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "tiny"}]})


@pytest.fixture
def chat() -> Iterator[Chat]:
    """The server, in a thread."""
    double, ready = Chat(), threading.Event()
    loop = asyncio.new_event_loop()

    async def start() -> web.AppRunner:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", double.complete)
        app.router.add_get("/v1/models", double.models)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        double.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return runner

    def serve() -> None:
        runner = loop.run_until_complete(start())
        ready.set()
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=serve)
    thread.start()
    ready.wait()
    yield double
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    path = tmp_path / "suites.yaml"
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    suites = {
        "sums": {
            "prompts": str(tmp_path / "rows.jsonl"),
            "template": "What is {question}? Write \\boxed{} and {{x}.",
            "answer_field": "solution",
            "reward": {"name": "math"},
            "samples": 4,
            "max_response_tokens": 9,
            "temperature": 0.6,
            "top_p": 0.9,
        }
    }
    path.write_text(yaml.safe_dump(suites))
    return path


def test_a_server_is_evaluated(
    chat: Chat,
    suite: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    out = tmp_path / "out"
    assert main(["evaluate", f"{chat.url}/v1/", "--suite", str(suite), "-o", str(out)]) == 0
    assert len(chat.requests) == 8
    for given in chat.requests:
        assert (given["model"], given["max_tokens"]) == ("tiny", 9)
        assert (given["temperature"], given["top_p"]) == (0.6, 0.9)
        assert given["key"] == "Bearer secret" and "top_k" not in given
    texts = {given["messages"][0]["content"] for given in chat.requests}
    assert texts == {rf"What is {q}? Write \boxed{{}} and {{x}}." for q in ("6 * 7", "1 / 2")}

    rows = [json.loads(line) for line in (out / "evaluation.jsonl").read_text().splitlines()]
    assert [(r["problem"], r["sample"], r["reward"]) for r in rows] == [
        (problem, sample, float(sample % 2 == 0)) for problem in (0, 1) for sample in range(4)
    ]
    assert [r["read_answer"] for r in rows] == ["42", "7", "42", None, "1/2", "7", "1/2", None]
    (record,) = (json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines())
    figures = {k.removeprefix("evaluation/sums/"): v for k, v in record.items() if "/" in k}
    shares = {"pass_at_1": 0.5, "pass_at_2": pytest.approx(5 / 6), "pass_at_4": 1.0}
    interval = {"mean": 0.5, "ci_low": 0.5, "ci_high": 0.5}
    others = {"maj_at_4": 1.0, "truncated": 0.25, "length": 6.5, "problems": 2.0}
    assert figures == interval | shares | others | {"failed": 0.0, "left_out": 0.0}
    out_text = capsys.readouterr().out
    # two problems with equal scores give no interval
    assert "0.500" in out_text and "0.500–0.500" not in out_text
    # The results of a second evaluation are not mixed with the first.
    assert main(["evaluate", chat.url, "--suite", str(suite), "-o", str(out)]) == 2
    assert "holds the responses of an evaluation" in capsys.readouterr().err


def test_the_tools_of_rows_are_sent(chat: Chat, suite: Path, tmp_path: Path) -> None:
    function = {"type": "function", "function": {"name": "multiply", "parameters": {}}}
    rows = [{**ROWS[0], "tools": json.dumps([function])}, {**ROWS[1], "tools": "a hammer"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["evaluate", chat.url, "--suite", str(suite), "-o", str(tmp_path / "out")]) == 0
    for given in chat.requests:
        described = {"tools": [function], "tool_choice": "none"}
        expected = described if "6 * 7" in given["messages"][0]["content"] else {}
        assert {key: given[key] for key in ("tools", "tool_choice") if key in given} == expected


def test_responses_are_kept_if_their_reward_fails(
    chat: Chat,
    suite: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "reward_of_test_server.py").write_text("def score(samples): raise OSError('gone')")
    reward = "{import_path: 'reward_of_test_server:score', on_failure: stop, retries: 0}"
    words = ["evaluate", chat.url, "--suite", str(suite), "-o", str(tmp_path / "out")]
    assert main([*words, f"evaluation.suites.sums.reward={reward}"]) == 2
    told = capsys.readouterr().err
    assert "gone" in told and "Traceback" not in told
    rows = [json.loads(x) for x in (tmp_path / "out/evaluation.jsonl").read_text().splitlines()]
    assert [(r["problem"], r["sample"]) for r in rows] == [(p, n) for p in (0, 1) for n in range(4)]
    assert sum(bool(row["response"]) for row in rows) == 6 and {r["reward"] for r in rows} == {None}
    assert not (tmp_path / "out/metrics.jsonl").read_text()


def test_responses_are_kept_if_the_server_fails(
    chat: Chat, suite: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chat.failures, chat.most = [], 3
    words = ["evaluate", chat.url, "--suite", str(suite), "-o", str(tmp_path / "out")]
    assert main([*words, "--requests", "1"]) == 2
    told = capsys.readouterr().err
    assert "HTTP 400: no such sampling" in told and "Traceback" not in told
    rows = [json.loads(x) for x in (tmp_path / "out/evaluation.jsonl").read_text().splitlines()]
    assert [(row["problem"], row["sample"]) for row in rows] == [(0, 0), (0, 1), (0, 2)]
    assert {row["reward"] for row in rows} == {None} and all(row["response"] for row in rows)
    assert not (tmp_path / "out/metrics.jsonl").read_text()


def test_a_server_that_refuses_is_not_asked_again(
    chat: Chat, suite: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chat.refuses, chat.failures = True, []
    words = ["evaluate", chat.url, "--suite", str(suite), "-o", str(tmp_path / "out")]
    assert main([*words, "evaluation.suites.sums.top_k=5", "--requests", "1"]) == 2
    assert "HTTP 400: no such sampling" in capsys.readouterr().err
    assert chat.requests == []
    chat.refuses = False  # the failed evaluation left nothing, so the same command begins anew
    assert main(["evaluate", chat.url, "--suite", str(suite), "-o", str(tmp_path / "out")]) == 0


@pytest.mark.parametrize(
    "says",
    [
        b"",
        b"\xff\xfe\x00",
        b"[" * 200_000,
        b"[]",
        b'{"choices": []}',
        b'{"choices": [{"message": {"content": ["a"]}, "finish_reason": "stop"}]}',
        b'{"choices": [{"message": {"content": "a"}, "finish_reason": "stop"}],'
        b' "usage": {"completion_tokens": "many"}}',
    ],
)
def test_an_answer_that_is_none_is_named_with_the_server(
    chat: Chat, suite: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], says: bytes
) -> None:
    chat.says, chat.failures = says, []
    words = ["evaluate", chat.url, "--suite", str(suite), "-o", str(tmp_path / "out")]
    assert main([*words, "--requests", "1"]) == 2
    told = capsys.readouterr().err
    assert chat.url in told and "Traceback" not in told
    assert "the answer is not JSON" in told or "not an answer in OpenAI's form" in told


def test_all_mistakes_are_told_before_the_server_is_asked(
    chat: Chat, suite: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"question": "a", "solution": "1"}\n{"question": 5\n')
    base = ["evaluate", chat.url, "--suite", str(suite)]
    assert main([*base, "evaluation.suites.sums.reward.name=maths"]) == 2
    told = capsys.readouterr().err
    assert "reward.name = maths: no such reward" in told
    assert f"{tmp_path}/rows.jsonl:2: not JSON" in told
    words = ["evaluation.suites.sums.temperature=0", "model.preset=tiny", "evaluation.interval=5"]
    words += ["evaluation.suites.sums.chat_template=false"]
    assert main([*base, *words]) == 2
    told = capsys.readouterr().err
    assert "evaluation.suites.sums.temperature = 0.0: greedy responses are all the same" in told
    assert "model: nothing reads it without a model" in told
    assert "evaluation.interval = 5: nothing reads it without a run; allowed: 0" in told
    assert "evaluation.suites.sums.chat_template = false: a server applies its own chat" in told
    assert main([*base, "evaluation.suites.sums.smples=4"]) == 2
    assert "evaluation.suites.sums.smples = 4: unknown key; did you mean samples" in (
        capsys.readouterr().err
    )
    judge = "{name: llm_judge, options: {mode: pairs, url: 'http://x/v1', model: m}}"
    words = [f"evaluation.suites.sums.reward={judge}", "evaluation.suites.sums.samples=1"]
    assert main([*base, *words]) == 2
    told = capsys.readouterr().err
    assert "reward.options.mode = pairs: compares the responses of a group, and a group has 1" in (
        told
    )
    assert main(["evaluate", chat.url]) == 2
    assert "names nothing to evaluate" in capsys.readouterr().err
    assert chat.requests == []


class Failing:
    """A session whose first responses have an error status."""

    def __init__(self, failures: int, status: int, wait: str = "") -> None:
        self.left, self.status, self.asked = failures, status, 0
        self.wait = wait  # the header Retry-After

    @asynccontextmanager
    async def request(self, *_: Any, **__: Any) -> Any:
        self.asked += 1
        self.left -= 1
        yield Answer(self.status if self.left >= 0 else 200, {"Retry-After": self.wait})


@dataclass
class Answer:
    status: int
    headers: dict[str, str]

    @property
    def content(self) -> Answer:
        return self

    async def iter_chunked(self, _: int) -> AsyncGenerator[bytes]:
        yield b'{"done": true}' if self.status == 200 else b"busy"


@pytest.mark.parametrize(
    ("failures", "status", "asked"),
    [(0, 503, 1), (4, 503, 5), (4, 429, 5), (5, 503, None), (1, 400, None), (1, 404, None)],
)
@pytest.mark.parametrize("told", ["", "7"])
def test_a_request_is_repeated_four_times_and_only_where_that_may_help(
    monkeypatch: pytest.MonkeyPatch, failures: int, status: int, asked: int | None, told: str
) -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(server.asyncio, "sleep", sleep)
    session: Any = Failing(failures, status, told)
    call = server._call(session, "http://server/v1", {})
    if asked is None:
        with pytest.raises(RolloutError, match=f"http://server/v1: HTTP {status}: busy"):
            asyncio.run(call)
        asked = 5 if status == 503 else 1
    else:
        assert asyncio.run(call) == {"done": True}
    assert session.asked == asked
    # the server may want a further wait before each repetition
    wanted = [float(told)] if told else []
    assert waits == [n for own in (0.5, 1.0, 2.0, 4.0)[: asked - 1] for n in (*wanted, own)]
