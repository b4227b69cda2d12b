"""The environment `agent`: programs of several kinds run as processes, and a scripted policy
answers their requests."""

from __future__ import annotations

import asyncio
import datetime
import gc
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from gspo_megatron.data.tokenizers import Tokenizer, load_tokenizer
from gspo_megatron.environments import agent
from gspo_megatron.environments.agent import Agent
from gspo_megatron.environments.episode import Episode, EpisodeLimits, EpisodeRunner, TurnRequest
from gspo_megatron.environments.gateway import Gateway
from gspo_megatron.environments.transcript import Written
from gspo_megatron.types import Prompt
from tests.listeners import addresses_of_listeners
from tests.tasksets import TEMPLATE, letters
from tests.unit.environments.characters import shown

FIELDS = {"level": 4, "day": datetime.date(2025, 1, 31)}
CALL = '<tool_call>{"name": "add", "arguments": {"b": 2, "a": 1}}</tool_call>'
# Every program of these tests begins with this code. It sends the same requests as the package
# openai, but needs only the standard library.
HEAD = """
import json, os, sys, urllib.error, urllib.request
row = json.load(sys.stdin)
def post(path, content, key=os.environ["OPENAI_API_KEY"]):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + path,
        json.dumps(content).encode(),
        {"Authorization": "Bearer " + key, "Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        return json.load(error)
def chat(messages, **options):
    return post("/chat/completions", {"model": "any", "messages": messages, **options})
def impatient(messages, seconds, headers={}):
    # None: no answer after so many seconds
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "any", "messages": messages}).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], **headers},
    )
    try:
        with urllib.request.urlopen(request, timeout=seconds) as answer:
            return json.load(answer)["choices"][0]["message"]
    except TimeoutError:
        return None
user = {"role": "user", "content": row["prompt"]}
"""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("letters")
    letters(folder)
    tools = "{%- for tool in tools or [] -%}[{{- tool.function.name -}}]{%- endfor -%}"
    (folder / "chat_template.jinja").write_text(tools + TEMPLATE)
    return load_tokenizer(folder / "tokenizer.model")


Play = Callable[..., tuple[Episode, list[TurnRequest]]]


@pytest.fixture
def play(tokenizer: Tokenizer, tmp_path: Path) -> Play:
    def run(
        program: str,
        turns: list[str],
        limits: EpisodeLimits | None = None,
        turn_seconds: float | list[float] = 0.0,
        abort_seconds: float = 0.0,  # that the engine needs to drop a turn
        later_seconds: float = 0.0,  # that the event loop runs after the episode
        **options: Any,
    ) -> tuple[Episode, list[TurnRequest]]:
        path = tmp_path / "agent.py"
        path.write_text(HEAD + program)
        asked: list[TurnRequest] = []

        async def write(wanted: TurnRequest) -> Written:
            asked.append(wanted)
            is_same = isinstance(turn_seconds, float)
            try:
                await asyncio.sleep(turn_seconds if is_same else turn_seconds[len(asked) - 1])
            except asyncio.CancelledError:
                await asyncio.sleep(abort_seconds)
                raise
            ids = [*tokenizer.encode(turns[wanted.turn]), tokenizer.eos_id]
            return Written(ids[: wanted.max_tokens], len(ids) > wanted.max_tokens)

        environment = Agent(f"{sys.executable} {path}", **options)
        runner = EpisodeRunner(environment, tokenizer, limits or EpisodeLimits(5, 400, 400))
        task = Prompt("1+2?", "3", "f:7", FIELDS, token_ids=(9, 9), row_id="seven")

        async def run_episode() -> Episode:
            episode = await runner.run(task, write)
            await asyncio.sleep(later_seconds)
            return episode

        return asyncio.run(run_episode()), asked

    return run


def test_a_program_with_tools_is_captured_to_the_last_token(
    play: Play, tokenizer: Tokenizer
) -> None:
    episode, asked = play(
        """
tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
first = chat([user], tools=tools)
message = first["choices"][0]["message"]
assert first["choices"][0]["finish_reason"] == "tool_calls", first
call = message["tool_calls"][0]
given = json.loads(call["function"]["arguments"])
# as the openai package sends it back: other keys, and arguments written in another way
again = {**message, "refusal": None, "annotations": []}
call["function"]["arguments"] = json.dumps(given, indent=1)
result = {"role": "tool", "tool_call_id": call["id"], "content": str(given["a"] + given["b"])}
second = chat([user, again, result], tools=tools, temperature=0.3)
said = second["choices"][0]["message"]["content"]
assert post("/reward", {"reward": float(said == row["answer"]) + row["level"]}) == {}
print(second["usage"])
""",
        [f"so {CALL}", "3"],
    )
    assert episode.error is None and episode.given == 5.0
    before = [shown(tokenizer, each.token_ids) for each in asked]
    assert before[0] == "[add]<|user|>1+2?</s><|assistant|>"
    assert before[1] == f"{before[0]}so {CALL}</s><|tool|>3</s><|assistant|>"
    assert shown(tokenizer, episode.client.transcript.prompt) == before[0]
    assert before[0] + shown(tokenizer, episode.transcript.response) == before[1] + "3</s>"
    assert shown(tokenizer, episode.transcript.response[episode.mask]) == f"so {CALL}</s>3</s>"


def test_a_row_of_a_parquet_file_may_have_dates(play: Play) -> None:
    episode, _ = play("assert row['day'] == '2025-01-31'; chat([user])", ["a"])
    assert episode.error is None


def test_a_program_that_cannot_be_started_leaves_no_file_open(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent, "command_under_keeper", lambda *_: ["/no/such/program"])
    counts = []
    for _ in range(3):
        episode, _ = play("", [])
        assert "FileNotFoundError" in str(episode.error)
        gc.collect()  # closes the server of this episode
        counts.append(len(os.listdir("/proc/self/fd")))
    assert counts[1] == counts[2]


def test_the_reward_function_scores_where_the_program_gives_none(play: Play) -> None:
    episode, asked = play("chat([user], max_tokens=2)", ["abc"])
    assert episode.error is None and episode.given is None
    assert [each.max_tokens for each in asked] == [2] and not episode.client.is_cut


def test_a_program_may_ask_for_streams(play: Play, tokenizer: Tokenizer) -> None:
    episode, _ = play(
        """
def streamed(messages, **options):
    content = {"messages": messages, "stream": True, **options}
    key, url = (os.environ["OPENAI_" + name] for name in ("API_KEY", "BASE_URL"))
    request = urllib.request.Request(
        url + "/chat/completions", json.dumps(content).encode(), {"Authorization": "Bearer " + key}
    )
    with urllib.request.urlopen(request) as answer:
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        *events, last, rest = answer.read().decode().split("\\n\\n")
    assert (last, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]
tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
first, end, usage = streamed([user], tools=tools, stream_options={"include_usage": True})
assert first["object"] == "chat.completion.chunk" and first["id"] == end["id"] == usage["id"]
assert end["choices"][0] == {"index": 0, "delta": {}, "finish_reason": "tool_calls"}
assert usage["choices"] == [] and usage["usage"]["completion_tokens"] > 9
message = first["choices"][0]["delta"]
assert message["tool_calls"][0].pop("index") == 0
result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "3"}
second, end = streamed([user, message, result], tools=tools)
assert second["choices"][0]["delta"] == {"role": "assistant", "content": "3"}
assert end["choices"][0]["finish_reason"] == "stop"
""",
        [f"so {CALL}", "3"],
    )
    assert shown(tokenizer, episode.transcript.response[episode.mask]) == f"so {CALL}</s>3</s>"
    assert episode.error is None


def test_a_call_of_no_function_is_text(play: Play) -> None:
    call = CALL.replace('"add"', "5")
    tools = [{"type": "function", "function": {"name": "add"}}]
    said = {"role": "assistant", "content": call}
    program = f"assert chat([user], tools={tools})['choices'][0]['message'] == {said}"
    episode, _ = play(program, [call])
    assert episode.error is None


def test_rewards_of_turns(play: Play) -> None:
    episode, _ = play(
        """
answer = chat([user])["choices"][0]["message"]
chat([user, answer, user])
post("/reward", {"turn_rewards": [0.5, 2]})
""",
        ["a", "bc"],
    )
    assert list(episode.given.rewards) == [0.5, 2]
    assert list(episode.given.ends) == [2, len(episode.transcript.response)]


def test_a_program_that_changes_the_history_begins_a_branch(
    play: Play, tokenizer: Tokenizer
) -> None:
    episode, asked = play(
        """
answer = chat([user])["choices"][0]["message"]
second = chat([user, answer, user])["choices"][0]["message"]
third = chat([{"role": "system", "content": "so far: " + second["content"]}, user])
tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
again = [{"role": "system", "content": "so far: b"}, user, third["choices"][0]["message"], user]
chat(again, tools=tools)
""",
        ["a", "b", "c", "d"],
    )
    assert episode.error is None
    before = [shown(tokenizer, each.token_ids) for each in asked]
    assert before[1] == f"{before[0]}a</s><|user|>1+2?</s><|assistant|>"
    assert before[2] == "<|system|>so far: b</s><|user|>1+2?</s><|assistant|>"
    # Another list of tools gives another prompt.
    assert before[3] == f"[add]{before[2]}c</s><|user|>1+2?</s><|assistant|>"
    assert [branch.turns for branch in episode.client.transcript.branches()] == [
        range(2),
        range(2, 3),
        range(3, 4),
    ]
    assert (
        shown(tokenizer, episode.transcript.sequence[0])
        == f"{before[1]}b</s>{before[2]}c</s>{before[3]}d</s>"
    )
    assert shown(tokenizer, episode.transcript.response[episode.mask]) == "a</s>b</s>c</s>d</s>"


def test_a_history_without_room_leaves_the_one_before_as_it_was(
    play: Play, tokenizer: Tokenizer
) -> None:
    program = """
answer = chat([user])["choices"][0]["message"]
refused = chat([user, answer, {"role": "user", "content": "z" * 500}, user])
refused = chat([{"role": "system", "content": "z" * 900}, user])
assert refused["error"]["code"] == "context_length_exceeded", refused
chat([user, answer, user])
"""
    episode, asked = play(program, ["a", "b"])
    assert episode.error is None
    before = [shown(tokenizer, each.token_ids) for each in asked]
    assert before[1] == f"{before[0]}a</s><|user|>1+2?</s><|assistant|>"


@pytest.mark.parametrize("survives", [True, False])
def test_a_limit_ends_the_episode(play: Play, survives: bool) -> None:
    program = """
answer = chat([user])["choices"][0]["message"]
refused = chat([user, answer, user])
assert refused["error"]["code"] == "context_length_exceeded", refused
"""
    episode, _ = play(
        program + ("" if survives else "sys.exit(3)"), ["a"], EpisodeLimits(1, 400, 400)
    )
    assert episode.error is None and episode.given is None and episode.client.is_cut


@pytest.mark.parametrize(
    ("program", "problem"),
    [
        ("chat([user]); sys.exit('no tool')", "the agent ended with exit code 1: no tool"),
        ("chat([user]); post('/reward', {'reward': 1}); sys.exit(3)", "ended with exit code 3"),
        ("pass", "ended without a turn"),
        ("chat([user], n=2)", "n = 2: not supported; allowed: 1"),
        ("chat([])", "a list of messages is wanted"),
        ("chat([{'role': 'robot', 'content': ''}])", "a message of the role 'robot'"),
        ("chat([{'role': 'user', 'content': [{'type': 'image_url'}]}])", "parts of the type text"),
        ("chat([{'role': 'user', 'content': 'x' * 500}])", "data.max_prompt_tokens"),
        ("chat([user], max_tokens='9')", "max_tokens = '9': a number is wanted"),
        ("chat([user], max_tokens=-1)", "max_tokens = -1: allowed: 1 or more"),
        ("chat([user], max_completion_tokens=0)", "max_tokens = 0: allowed: 1 or more"),
        ("chat([user], stop=['Observation:'])", "stop = ['Observation:']: not supported; allowed"),
        ("chat([user], tool_choice='none')", "tool_choice = none: not supported; allowed: auto"),
        ("chat([user], response_format={'type': 'json_object'})", "response_format = {'type': "),
        ("chat([user], tools={'a': 1})", "tools = {'a': 1}: a list is wanted"),
        ("chat([user], stream=True, stream_options=[1])", "stream_options = [1]: an object is"),
        ("post('/chat/completions', [1])", "the request is not a JSON object"),
        ("chat([{'role': 'user', 'content': 'a\\ud800'}])", "a request: "),
        ("chat([{'role': 'user', 'tool_calls': 5}])", "a request: TypeError: 'int' object"),
        (
            """
deep = {"id": "a", "function": {"name": "f", "arguments": "[" * 9000 + "]" * 9000}}
chat([user, {"role": "assistant", "content": None, "tool_calls": [deep]}, user])
""",
            "a tool call that is not as it was sent: nested more than 100 levels deep",
        ),
        (
            """
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    b"[" * 200_000, {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]})
try:
    urllib.request.urlopen(request)
except urllib.error.HTTPError as error:
    assert error.code == 400, error.code
""",
            "the request is not a JSON object",
        ),
        ("chat([user]); post('/reward', {'reward': 'a'})", "'a' of type str; a number is wanted"),
    ],
)
def test_what_a_program_does_wrong_is_named(play: Play, program: str, problem: str) -> None:
    episode, _ = play(program, ["a", "b"])
    assert problem in str(episode.error) and str(episode.error).endswith("; f:7")


def test_the_policy_s_time_is_not_the_program_s(play: Play) -> None:
    """A turn may have to wait for responses of the previous step. This time does not count as time
    of the program."""
    program = """
first = chat([user])["choices"][0]["message"]
chat([user, first, user])
"""
    episode, asked = play(program, ["a", "b"], turn_seconds=2.5, seconds=4.0)
    assert episode.error is None and len(asked) == 2


AGAIN = """
user2 = {"role": "user", "content": "go on"}
def until_answered(messages):
    while (answer := impatient(messages, PATIENCE)) is None:
        time.sleep(PAUSE)
    return answer
first = until_answered([user])
second = until_answered([user, first, user2])
assert (first["content"], second["content"]) == ("a", "b"), (first, second)
"""


@pytest.mark.parametrize(
    ("seconds", "patience", "pause"),
    [
        ([0.0, 0.0], 5.0, 0.0),
        ([1.0, 0.0], 0.3, 0.0),
        ([0.0, 1.0], 0.3, 0.0),
        ([0.5, 0.0], 0.3, 0.5),
    ],
    ids=["patient", "first turn", "second turn", "the turn ends before it asks again"],
)
def test_a_client_that_asks_again_gets_the_turn_that_it_asked_for(
    play: Play, tokenizer: Tokenizer, seconds: list[float], patience: float, pause: float
) -> None:
    program = f"import time\nPATIENCE, PAUSE = {patience}, {pause}\n" + AGAIN
    episode, asked = play(program, ["a", "b"], turn_seconds=seconds)
    assert episode.error is None and len(asked) == 2, "each turn is drawn once"
    assert [branch.turns for branch in episode.client.transcript.branches()] == [range(2)]
    assert shown(tokenizer, episode.transcript.response[episode.mask]) == "a</s>b</s>"


def test_a_client_that_says_that_it_repeats_gets_the_same_answer(play: Play) -> None:
    """The client repeats a request if the answer to its first attempt was lost on the way."""
    episode, asked = play(
        """
import time
first = impatient([user], 9)
again = impatient([user], 9, {"X-Stainless-Retry-Count": "1"})
other = impatient([user], 9, {"X-Stainless-Retry-Count": "0"})
assert [each["content"] for each in (first, again, other)] == ["a", "a", "b"]
""",
        ["a", "b"],
    )
    assert episode.error is None and len(asked) == 2
    assert [branch.turns for branch in episode.client.transcript.branches()] == [
        range(1),
        range(1, 2),
    ]


@pytest.mark.parametrize("pause", [0.0, 0.7], ids=["under way", "drawn"])
def test_a_turn_that_nobody_has_read_is_not_trained(
    play: Play, tokenizer: Tokenizer, pause: float
) -> None:
    """The client stops waiting for a turn and sends another request. At the end it stops waiting
    for a turn and sends no more requests."""
    episode, _ = play(
        f"""
import time
other = {{"role": "user", "content": "2?"}}
assert impatient([other], 0.2) is None
time.sleep({pause})
answer = impatient([user], 9)
assert answer["content"] == "a", answer
assert impatient([user, answer, other], 0.2) is None
time.sleep({pause})
post("/reward", {{"turn_rewards": [0.5]}})
""",
        ["a", "b"],
        turn_seconds=[0.5, 0.0, 0.5],
    )
    assert episode.error is None
    assert list(episode.given.rewards) == [0.5] and list(episode.given.ends) == [2]
    assert shown(tokenizer, episode.transcript.sequence[0]) == "<|user|>1+2?</s><|assistant|>a</s>"
    assert [each["content"] for each in episode.client.messages] == ["1+2?", "a"]


DROPPED = """
import time
other = {"role": "user", "content": "2?"}
first = impatient([other], 9)
assert impatient([other, first, other], 0.3) is None
assert impatient([user], 0.3) is None  # the turn before it is being dropped
"""


@pytest.mark.parametrize("content", ["1+2?", "3?"], ids=["the same request", "another request"])
def test_a_request_during_the_drop_of_a_turn_waits(play: Play, content: str) -> None:
    """The client stops waiting for a request while the engine still drops the turn before it."""
    program = (
        f"{DROPPED}assert impatient([{{**user, 'content': {content!r}}}], 9)['content'] == 'b'"
    )
    episode, asked = play(program, ["a", "b"], turn_seconds=[0.0, 5.0, 0.0, 0.0], abort_seconds=1.0)
    assert episode.error is None
    assert [each.turn for each in asked] == ([0, 1, 1] if content == "1+2?" else [0, 1, 1, 1])
    assert [each["content"] for each in episode.client.messages] == [content, "b"]
    assert len(episode.transcript.turns) == 2


def test_no_turn_begins_after_the_program_s_end(play: Play) -> None:
    """The program ends while a request waits for the drop of the turn before it."""
    episode, asked = play(
        DROPPED, ["a", "b"], turn_seconds=[0.0, 9.0], abort_seconds=1.5, later_seconds=2.0
    )
    assert episode.error is None and len(asked) == 2
    assert [each["content"] for each in episode.client.messages] == ["2?", "a"]
    assert len(episode.transcript.turns) == 1


@pytest.mark.timeout(600)
def test_nothing_of_a_program_that_hangs_is_left(play: Play, tmp_path: Path) -> None:
    told = tmp_path / "pids"
    program = f"""
import subprocess, time
chat([user])
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
open({str(told)!r}, "w").write(json.dumps([os.getpid(), child.pid]))
time.sleep(600)
"""
    seconds = 3.0
    # On a busy machine the program may be ended before it has written its process ids.
    while not (told.exists() and told.read_text()):
        episode, _ = play(program, ["a"], seconds=seconds)
        assert f"took longer than environment.options.seconds = {seconds:g}" in str(episode.error)
        seconds *= 4
    for pid in json.loads(told.read_text()):
        assert not psutil.pid_exists(pid)


def test_a_program_that_prints_without_end(play: Play) -> None:
    """Only the end of its output is kept in memory."""
    before = psutil.Process().memory_info().rss
    program = "while True: os.write(1, bytes(1 << 20))"
    episode, _ = play(program, [], seconds=6.0)
    assert "took longer than environment.options.seconds" in str(episode.error)
    assert psutil.Process().memory_info().rss - before < 64 << 20


def test_a_key_of_no_episode_is_refused(play: Play) -> None:
    episode, asked = play(
        """
told = post("/chat/completions", {"messages": [user]}, key="guessed")
assert "no episode has this key" in told["error"]["message"], told
assert "no episode" in post("/reward", {"reward": 1}, key="guessed")["error"]["message"]
chat([user])
""",
        ["a"],
    )
    assert episode.error is None and len(asked) == 1 and "OPENAI_API_KEY" not in os.environ


def test_the_gateway_listens_on_loopback_alone() -> None:
    """docs/security.md promises this."""

    async def address() -> list[str]:
        gateway = Gateway()
        port = int((await gateway.url()).rpartition(":")[2])
        found = addresses_of_listeners([os.getpid()])
        return [each for each, ports in found.items() if port in ports]

    assert asyncio.run(address()) == ["127.0.0.1"]
