"""A teacher behind a URL: what is asked of a server, and what follows a wrong answer. The server of
these tests answers as vLLM does; tests/vllm/test_distillation.py asks a real one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from gspo_megatron.config.objectives import DistillationSection
from gspo_megatron.config.schema import RewardSection
from gspo_megatron.errors import RewardError
from gspo_megatron.rollout import teacher as module
from gspo_megatron.rollout.teacher import PROBE, Judged, Teachers

Answer = Callable[[dict[str, Any]], Any]


def logprob(tokens: list[int], number: int) -> float:
    """A made-up log-prob that depends on all tokens before."""
    return -0.01 * (1 + sum(tokens[: number + 1]))


def right(given: dict[str, Any]) -> dict[str, Any]:
    tokens = given["prompt"]
    assert given["model"] == "the teacher" and given["prompt_logprobs"] == 0
    entries: list[Any] = [None]
    for number in range(1, len(tokens)):
        entry = {"logprob": logprob(tokens, number), "rank": 1, "decoded_token": "x"}
        entries.append({str(tokens[number]): entry})
    return {"choices": [{"prompt_logprobs": entries}]}


@contextmanager
def served(answer: Answer, tokens: list[int], keys: list[str | None]) -> Generator[str]:
    """The server's URL; what `answer` raises is an error 500."""

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "the teacher"}]})

    async def tokenize(request: web.Request) -> web.Response:
        given = await request.json()
        assert given["prompt"] == PROBE and not given["add_special_tokens"]
        return web.json_response({"tokens": tokens})

    async def complete(request: web.Request) -> web.Response:
        keys.append(request.headers.get("Authorization"))
        return web.json_response(answer(await request.json()))

    application = web.Application()
    application.router.add_get("/v1/models", models)
    application.router.add_post("/tokenize", tokenize)
    application.router.add_post("/v1/completions", complete)
    loop, started, port = asyncio.new_event_loop(), threading.Event(), [0]

    async def start() -> web.AppRunner:
        runner = web.AppRunner(application)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port[0] = runner.addresses[0][1]
        started.set()
        return runner

    def run() -> None:
        runner = loop.run_until_complete(start())
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert started.wait(60)
        yield f"http://127.0.0.1:{port[0]}/v1"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


def group_of(**more: Any) -> Any:
    """Two responses to one prompt: 3 + 2 and 3 + 1 tokens."""
    lengths = {"prompt_lengths": np.array([3, 3]), "response_lengths": np.array([2, 1])}
    lengths["group_index"] = np.array([0, 0])
    tokens = np.array([5, 6, 7, 8, 9, 5, 6, 7, 4], np.int32)
    return SimpleNamespace(**{"tokens": tokens, "in_response": None} | lengths | more)


def ask(
    answer: Answer, group: Any = None, tokens: tuple[int, ...] = (1, 2), **reward: Any
) -> Judged:
    tokenizer: Any = SimpleNamespace(encode=lambda text: [1, 2])
    with served(answer, list(tokens), keys := []) as url:
        section = RewardSection(**{"retries": 0, "timeout_seconds": 20.0} | reward)
        teacher = Teachers(DistillationSection(url=url), section, tokenizer)
        judged = teacher.judge(group or group_of(), {})
        assert teacher.judge(group or group_of(), {}).logprobs.shape == judged.logprobs.shape
    assert {*keys} <= {None}
    return judged


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(module.KEY_VARIABLE, raising=False)


def test_each_response_token_has_the_log_prob_that_the_server_gives_it() -> None:
    judged = ask(right)
    first, second = [5, 6, 7, 8, 9], [5, 6, 7, 4]
    expected = [logprob(first, 3), logprob(first, 4), logprob(second, 3)]
    assert judged.logprobs.dtype == np.float32
    assert judged.logprobs.tolist() == pytest.approx(expected, rel=1e-6)
    assert judged.failures == 0 and judged.seconds.shape == (1,)


def test_each_branch_of_an_episode_is_asked_by_itself() -> None:
    kinds = np.array([0, 0, 1, 0, 1, 0, 0, 0, 1], bool)  # three branches, then a single one
    group = group_of(
        in_response=kinds, prompt_lengths=np.array([3, 3]), response_lengths=np.array([2, 1])
    )
    branches = [[5, 6, 7], [8, 9], [5, 6, 7, 4]]
    judged = ask(right, group)
    assert judged.logprobs.tolist() == pytest.approx(
        [logprob(branch, len(branch) - 1) for branch in branches], rel=1e-6
    )


def test_a_prompt_alone_is_no_branch_of_the_response_before_it() -> None:
    """The second response's prompt follows the first response directly."""
    judged = ask(right, group_of(in_response=np.array([0, 0, 0, 1, 1, 0, 0, 0, 1], bool)))
    assert judged.logprobs.tolist() == pytest.approx(ask(right).logprobs.tolist())


def test_a_rank_without_responses_asks_nothing() -> None:
    empty = np.array([], np.int64)
    lengths = {"prompt_lengths": empty, "response_lengths": empty}
    nothing = SimpleNamespace(tokens=np.array([], np.int32), in_response=None, **lengths)
    assert ask(lambda _: pytest.fail("asked"), nothing).logprobs.shape == (0,)


def changed(change: Callable[[list[Any], str], Any]) -> Answer:
    """A right answer but for what is said of the last token."""

    def answer(given: dict[str, Any]) -> Any:
        found = right(given)
        change(found["choices"][0]["prompt_logprobs"], str(given["prompt"][-1]))
        return found

    return answer


WRONG = {
    "NaN": (changed(lambda e, t: e[-1][t].update(logprob=float("nan"))), "a log-prob of nan"),
    "null": (changed(lambda e, t: e[-1][t].update(logprob=None)), "TypeError"),
    "another token": (changed(lambda e, t: e[-1].pop(t)), "KeyError"),
    "a token less": (changed(lambda e, t: e.pop()), "ValueError: log-probs of "),
    "no log-probs": (lambda _: {"choices": [{}]}, "prompt_logprobs"),
    "an error": (lambda _: 1 / 0, "says 500"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_answer_is_one_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_WAIT_SECONDS", 0.01)
    answer, said = WRONG[name]
    with pytest.raises(RewardError) as caught:
        ask(answer, retries=1)
    line = str(caught.value)
    assert line.startswith("objective.distillation.url = http://127.0.0.1:") and "\n" not in line
    assert said in line and line.endswith("in the last of 2 calls")


def test_a_response_whose_call_fails_for_good_is_lost_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "FIRST_WAIT_SECONDS", 0.01)

    def answer(given: dict[str, Any]) -> Any:
        return right(given) if len(given["prompt"]) == 4 else {}

    judged = ask(answer, retries=2, on_failure="drop_group")
    assert np.isnan(judged.logprobs).tolist() == [True, True, False]
    assert judged.failures == 3
    assert capsys.readouterr().err.count("it is asked again") == 1


def test_an_answer_after_a_failure_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_WAIT_SECONDS", 0.01)
    seen: list[int] = []

    def answer(given: dict[str, Any]) -> Any:
        seen.append(len(given["prompt"]))
        return {} if seen.count(5) == 1 and seen[-1] == 5 else right(given)

    judged = ask(answer, retries=1)
    assert judged.failures == 1
    assert judged.logprobs.tolist() == pytest.approx(ask(right).logprobs.tolist())


def test_a_slow_teacher_is_late() -> None:
    wait = threading.Event()
    with pytest.raises(RewardError, match="TimeoutError"):
        ask(lambda _: wait.wait(1.5) or {}, timeout_seconds=0.2)


def test_another_tokenizer_is_refused_by_name() -> None:
    with pytest.raises(RewardError, match="its tokenizer makes other tokens of a text"):
        ask(right, tokens=(1, 3))


def test_a_url_that_is_none_of_a_server(unused_tcp_port: int) -> None:
    tokenizer: Any = SimpleNamespace(encode=lambda text: [1, 2])
    section = DistillationSection(url=f"http://127.0.0.1:{unused_tcp_port}/v1")
    with pytest.raises(RewardError, match=r"distillation.url = .* ClientConnectorError: Cannot"):
        Teachers(section, RewardSection(retries=0), tokenizer).judge(group_of(), {})


@pytest.fixture
def unused_tcp_port() -> Generator[int]:
    import socket

    with socket.socket() as held:  # bound, and nobody listens
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]
