"""A teacher behind a URL: the requests to its server, and the effect of a wrong answer. The server
of these tests answers like vLLM; tests/vllm/test_distillation.py uses a real one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from copy import copy
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from aiohttp import web

from gspo_megatron.config.distillation import DistillationSection
from gspo_megatron.config.schema import RewardSection
from gspo_megatron.errors import DataError, RewardError
from gspo_megatron.rollout import asking
from gspo_megatron.rollout import teacher as module
from gspo_megatron.rollout.teacher import Teachers, check_teachers
from gspo_megatron.rollout.types import COLUMNS
from gspo_megatron.types import Prompt
from tests.unit.rollout.model_server import Answer, model_server


def logprob(tokens: list[int], number: int) -> float:
    """A made-up log-prob of token `number`, which depends on all earlier tokens."""
    return -0.01 * (1 + sum(tokens[: number + 1]))


def right(given: dict[str, Any]) -> dict[str, Any]:
    tokens, k = given["prompt"], given["prompt_logprobs"]
    assert given["model"] == "the teacher"
    entries: list[Any] = [None]
    for number in range(1, len(tokens)):
        # Like vLLM, it gives the token itself first, and then the most probable tokens.
        found = {str(tokens[number]): logprob(tokens, number)} | best(number, k)
        entries.append({t: {"logprob": value, "decoded_token": "x"} for t, value in found.items()})
    return {"choices": [{"prompt_logprobs": entries}]}


def best(number: int, k: int) -> dict[str, float]:
    """Made-up log-probs of the most probable tokens at a position."""
    return {str(100 + number - each): -0.001 * (each + 1) for each in range(k)}


@contextmanager
def served(answer: Answer, tokens: list[int], keys: list[str | None]) -> Generator[str]:
    """Serve a teacher, and yield its URL. See `model_server`."""
    model = {"id": "the teacher"}
    with model_server(model, "/v1/completions", answer, tokens, keys) as url:
        yield f"{url}/v1"


def group_of(**more: Any) -> Any:
    """A group of two responses to one prompt, with 3 + 2 and 3 + 1 tokens. It has no columns of
    teachers yet."""
    lengths = {"prompt_lengths": np.array([3, 3]), "response_lengths": np.array([2, 1])}
    lengths["group_index"] = np.array([0, 0])
    tokens = np.array([5, 6, 7, 8, 9, 5, 6, 7, 4], np.int32)
    names = [name for name in COLUMNS if name.startswith("teacher")]
    columns = {"tokens": tokens, "in_response": None} | dict.fromkeys(names)
    return SimpleNamespace(**columns | lengths | more)


def judge(teachers: Teachers, group: Any, prompts: dict[int, Prompt] | None = None) -> Any:
    """Let the teachers judge a group. Returns the group, with the number of failures."""
    group.failures = asyncio.run(teachers.judge(group, prompts or {}))
    return group


def ask(
    answer: Answer, group: Any = None, tokens: tuple[int, ...] = (1, 2), k: int = 0, **reward: Any
) -> Any:
    """Return the judged group: see `judge`. A teacher can judge several times."""
    tokenizer: Any = SimpleNamespace(encode=lambda text: [1, 2])
    with served(answer, list(tokens), keys := []) as url:
        section = RewardSection(**{"retries": 0, "timeout_seconds": 20.0} | reward)
        more: Any = {"form": "forward_kl_topk", "top_k": k} if k else {}
        teacher = Teachers(DistillationSection(url=url, **more), section, tokenizer)
        judged = judge(teacher, group or group_of())
        again = judge(teacher, copy(judged))
        assert again.teacher_logprobs.shape == judged.teacher_logprobs.shape
    assert {*keys} <= {None}
    return judged


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(module.KEY_VARIABLE, raising=False)


def test_each_response_token_has_the_log_prob_that_the_server_gives_it() -> None:
    judged = ask(right)
    first, second = [5, 6, 7, 8, 9], [5, 6, 7, 4]
    expected = [logprob(first, 3), logprob(first, 4), logprob(second, 3)]
    assert judged.teacher_logprobs.dtype == np.float32
    assert judged.teacher_logprobs.tolist() == pytest.approx(expected, rel=1e-6)
    assert judged.failures == 0 and judged.teacher_seconds.shape == (1,)
    assert judged.teacher_tokens is None and judged.teachers is None


def test_each_response_token_has_the_teachers_most_probable_tokens() -> None:
    judged = ask(right, k=3)
    assert judged.teacher_tokens.tolist() == [[103, 102, 101], [104, 103, 102], [103, 102, 101]]
    assert judged.teacher_top_logprobs.dtype == np.float32
    assert judged.teacher_top_logprobs[1].tolist() == pytest.approx([-0.001, -0.002, -0.003])
    plain = ask(right)
    assert judged.teacher_logprobs.tolist() == plain.teacher_logprobs.tolist()


def test_the_token_written_may_be_one_of_the_most_probable() -> None:
    def answer(given: dict[str, Any]) -> Any:
        found = right(given)
        for place, token in enumerate(given["prompt"][1:], start=1):
            entry = found["choices"][0]["prompt_logprobs"][place]
            entry.pop(str(100 + place))  # the first of the k most probable tokens
            entry[str(token)]["logprob"] = -0.0001
        return found

    judged = ask(answer, k=2)
    assert judged.teacher_tokens[0].tolist() == [8, 102]


SPECIALISTS: dict[str, Any] = {"math": {}, "code": {}, "chat": {}, "art": {"teacher": "a folder"}}


def test_several_teachers_judge_the_responses_to_their_own_prompts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There are four responses to four prompts. The first two prompts have a teacher behind a URL,
    the third a teacher in a folder. The last prompt has no teacher."""
    asked: dict[str, list[list[int]]] = {"math": [], "code": []}

    def answering(name: str) -> Answer:
        def answer(given: dict[str, Any]) -> Any:
            asked[name].append(given["prompt"])
            return right(given)

        return answer

    tokenizer: Any = SimpleNamespace(encode=lambda text: [1, 2])
    group = group_of(
        tokens=np.array([5, 6, 1, 5, 7, 2, 5, 8, 3, 5, 9, 4], np.int32),
        prompt_lengths=np.array([2, 2, 2, 2]),
        response_lengths=np.array([1, 1, 1, 1]),
        group_index=np.array([7, 8, 9, 10]),
    )
    domains = dict(zip([7, 8, 9, 10], ["code", "math", "art", "chat"]))
    prompts = {n: Prompt("", None, f"p:{n}", {"domain": d}) for n, d in domains.items()}
    with (
        served(answering("math"), [1, 2], []) as math,
        served(answering("code"), [1, 2], []) as code,
    ):
        teachers = SPECIALISTS | {"math": {"url": math}, "code": {"url": code}}
        section = DistillationSection.model_validate(
            {"field": "domain", "teachers": teachers, "form": "reverse_kl_topk", "top_k": 2}
        )
        judged = judge(Teachers(section, RewardSection(retries=0), tokenizer), group, prompts)
    assert asked == {"math": [[5, 7, 2]], "code": [[5, 6, 1]]}
    assert judged.teachers.tolist() == [1, 0, 3, -1]
    assert judged.teacher_logprobs[:2].tolist() == pytest.approx(
        [logprob([5, 6, 1], 2), logprob([5, 7, 2], 2)]
    )
    assert judged.teacher_logprobs[2:].tolist() == [0, 0]
    assert judged.teacher_tokens.tolist() == [[102, 101], [102, 101], [-1, -1], [-1, -1]]


def test_a_folder_and_no_server_tells_whose_prompts_they_are() -> None:
    section = DistillationSection.model_validate({"field": "domain", "teachers": SPECIALISTS})
    teachers = Teachers(section, RewardSection(), cast(Any, None))
    prompts = {0: Prompt("", None, "p:1", {"domain": "art"})}
    judged = judge(teachers, group_of(), prompts)
    assert judged.teachers.tolist() == [3, 3]
    assert judged.teacher_logprobs is None and judged.teacher_seconds is None


def test_a_prompt_that_names_no_teacher_is_told_by_its_line() -> None:
    section = DistillationSection.model_validate({"field": "domain", "teachers": SPECIALISTS})
    rows = [{"domain": "math"}, {"domain": "maths"}, {}, {"domain": 3}, {"domain": "chat"}]
    prompts = [Prompt("", None, f"p.jsonl:{n}", row) for n, row in enumerate(rows, start=1)]
    with pytest.raises(DataError) as caught:
        check_teachers(section, prompts)
    wanted = "but objective.distillation.field = domain needs one"
    others = "allowed: math, code, chat, art; a teacher {} is for prompts without a teacher"
    assert str(caught.value).splitlines() == [
        f"p.jsonl:2: domain = 'maths' names no teacher, {wanted}; {others}",
        f"p.jsonl:3: the row has no field 'domain', {wanted}",
        f"p.jsonl:4: domain = 3 names no teacher, {wanted}; {others}",
    ]
    check_teachers(DistillationSection(url="http://x"), prompts)


def test_each_branch_of_an_episode_is_asked_by_itself() -> None:
    # an episode of three branches, then a single response
    kinds = np.array([0, 0, 1, 0, 1, 0, 0, 0, 1], bool)
    group = group_of(
        in_response=kinds, prompt_lengths=np.array([3, 3]), response_lengths=np.array([2, 1])
    )
    branches = [[5, 6, 7], [8, 9], [5, 6, 7, 4]]
    judged = ask(right, group)
    assert judged.teacher_logprobs.tolist() == pytest.approx(
        [logprob(branch, len(branch) - 1) for branch in branches], rel=1e-6
    )


def test_a_prompt_alone_is_no_branch_of_the_response_before_it() -> None:
    """The prompt of the second response comes directly after the first response."""
    judged = ask(right, group_of(in_response=np.array([0, 0, 0, 1, 1, 0, 0, 0, 1], bool)))
    assert judged.teacher_logprobs.tolist() == pytest.approx(ask(right).teacher_logprobs.tolist())


def test_a_rank_without_responses_asks_nothing() -> None:
    empty = np.array([], np.int64)
    lengths = {"prompt_lengths": empty, "response_lengths": empty}
    nothing = group_of(tokens=np.array([], np.int32), **lengths)
    assert ask(lambda _: pytest.fail("asked"), nothing).teacher_logprobs.shape == (0,)


def changed(change: Callable[[list[Any], str], Any]) -> Answer:
    """An answer that `change` makes wrong for the last token."""

    def answer(given: dict[str, Any]) -> Any:
        found = right(given)
        change(found["choices"][0]["prompt_logprobs"], str(given["prompt"][-1]))
        return found

    return answer


def few(answer: Answer) -> Answer:
    """An answer that is wrong only if the most probable tokens are requested."""

    def answering(given: dict[str, Any]) -> Any:
        return answer(given) if given["prompt_logprobs"] else right(given)

    return answering


WRONG = {
    "NaN": (changed(lambda e, t: e[-1][t].update(logprob=float("nan"))), "a log-prob of nan"),
    "null": (changed(lambda e, t: e[-1][t].update(logprob=None)), "TypeError"),
    "another token": (changed(lambda e, t: e[-1].pop(t)), "KeyError"),
    "a token less": (changed(lambda e, t: e.pop()), "ValueError: log-probs of "),
    "no log-probs": (lambda _: {"choices": [{}]}, "prompt_logprobs"),
    "an error": (lambda _: 1 / 0, "says 500"),
    "fewer tokens": (
        few(changed(lambda e, _: (e[-1].popitem(), e[-1].popitem()))),
        "1 most probable tokens for top_k = 2",
    ),
    "a NaN in the list": (
        few(changed(lambda e, _: e[-1][[*e[-1]][-1]].update(logprob=float("nan")))),
        "a log-prob of nan",
    ),
    "null in the list": (
        few(changed(lambda e, _: e[-1][[*e[-1]][-1]].update(logprob=None))),
        "TypeError",
    ),
    "words for tokens": (
        few(changed(lambda e, _: e[-1].update({"the": {"logprob": -1}}))),
        "invalid literal",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_answer_is_one_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "FIRST_WAIT_SECONDS", 0.01)
    answer, said = WRONG[name]
    of_list = name in ("fewer tokens", "a NaN in the list", "null in the list", "words for tokens")
    with pytest.raises(RewardError) as caught:
        ask(answer, retries=1, k=2 if of_list else 0)
    line = str(caught.value)
    assert line.startswith("objective.distillation.url = http://127.0.0.1:") and "\n" not in line
    assert said in line and line.endswith("in the last of 2 calls")


def test_a_response_whose_call_fails_for_good_is_lost_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(asking, "FIRST_WAIT_SECONDS", 0.01)

    def answer(given: dict[str, Any]) -> Any:
        return right(given) if len(given["prompt"]) == 4 else {}

    judged = ask(answer, retries=2, on_failure="drop_group")
    assert np.isnan(judged.teacher_logprobs).tolist() == [True, True, False]
    assert judged.failures == 3
    assert capsys.readouterr().err.count("it is asked again") == 1


def test_a_server_that_gives_fewer_tokens_is_told_how_to_give_more() -> None:
    said = "Requested prompt logprobs of 64, which is greater than max allowed: 20"

    def answer(_: Any) -> Any:
        raise web.HTTPBadRequest(text=said)

    with pytest.raises(RewardError) as caught:
        ask(answer, k=64, retries=5, on_failure="drop_group")
    line = str(caught.value)
    assert said in line and line.endswith("start it with --max-logprobs 64, or lower top_k")


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
        judge(Teachers(section, RewardSection(retries=0), tokenizer), group_of())


def test_a_url_that_is_no_url_is_one_line() -> None:
    tokenizer: Any = SimpleNamespace(encode=lambda text: [1, 2])
    section = DistillationSection(url="http://[::1/v1")
    with pytest.raises(RewardError, match=r"^objective\.distillation\.url = http://\[::1/v1: "):
        judge(Teachers(section, RewardSection(retries=0), tokenizer), group_of())


def test_no_proxy_stands_before_a_teacher_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")  # nobody listens there
    judged = ask(right)
    assert judged.failures == 0 and np.isfinite(judged.teacher_logprobs).all()


@pytest.fixture
def unused_tcp_port() -> Generator[int]:
    import socket

    with socket.socket() as held:  # the port is in use, but no server listens on it
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]
