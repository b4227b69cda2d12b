"""Episodes: the text between turns, limits, and the values that an environment may return."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gspo_megatron.data.chat import CHATML
from gspo_megatron.data.tokenizers import Tokenizer, load_tokenizer
from gspo_megatron.environments.episode import (
    Client,
    Episode,
    EpisodeLimits,
    EpisodeRunner,
    LimitReached,
    Trajectory,
    TurnRequest,
)
from gspo_megatron.environments.registry import get_environment
from gspo_megatron.environments.transcript import Written
from gspo_megatron.errors import EpisodeError, RolloutError
from gspo_megatron.types import Message, Prompt, TurnRewards
from tests.unit.environments.characters import character_tokenizer, shown

# This template drops the text before "!" in all responses except the last, as Qwen3's template
# drops thoughts.
FORGETFUL = (
    "{%- for message in messages -%}{%- set content = message['content'] -%}"
    "{%- if message['role'] == 'assistant' and not loop.last -%}"
    "{%- set content = content.split('!')[-1] -%}{%- endif -%}"
    "{{- '<|im_start|>' ~ message['role'] ~ '\n' ~ content ~ eos_token ~ '\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("letters")
    character_tokenizer(folder)
    return folder


@pytest.fixture
def tokenizer(folder: Path) -> Tokenizer:
    (folder / "chat_template.jinja").write_text(CHATML)
    return load_tokenizer(folder / "tokenizer.model")


def client_of(
    tokenizer: Tokenizer,
    turns: list[tuple[str, bool]],
    limits: EpisodeLimits | None = None,
    tools: tuple[dict[str, Any], ...] = (),
) -> tuple[Client, list[TurnRequest]]:
    """A client whose policy writes these turns. The flag says whether a turn is cut off. A turn
    that is not cut off ends with the end-of-sequence token."""
    messages: tuple[Message, ...] = ({"role": "user", "content": "hi"},)
    rendered = tokenizer.render(messages, open_answer=True, tools=tools)
    ids = tuple(tokenizer.encode_rendered(rendered.text).ids)
    task = Prompt("hi", "there", "f:1", token_ids=ids, messages=messages, tools=tools)
    asked: list[TurnRequest] = []

    async def write(wanted: TurnRequest) -> Written:
        asked.append(wanted)
        await asyncio.sleep(0)
        text, cut = turns[wanted.turn]
        ids = tokenizer.encode(text) + [tokenizer.eos_id] * (not cut)
        return Written(ids[: wanted.max_tokens], cut or len(ids) > wanted.max_tokens)

    return Client(task, limits or EpisodeLimits(9, 200), tokenizer, write), asked


def test_a_turn_begins_with_all_that_stands_before_it(tokenizer: Tokenizer) -> None:
    client, asked = client_of(tokenizer, [("one", False), ("two", True), ("three", False)])
    opened = "<|im_start|>user\nhi</s>\n<|im_start|>assistant\n"

    async def play() -> None:
        turn = await client.generate()
        assert (turn.text, turn.truncated) == ("one", False)
        assert turn.token_ids == (*tokenizer.encode("one"), tokenizer.eos_id)
        await client.generate([{"role": "user", "content": "more"}])
        await client.generate([{"role": "tool", "content": "x"}, {"role": "user", "content": "y"}])

    asyncio.run(play())
    before = [shown(tokenizer, each.token_ids) for each in asked]
    assert before[0] == opened
    # The last token of the turn is the policy's. The template adds the line break.
    assert before[1] == f"{opened}one</s>\n<|im_start|>user\nmore</s>\n<|im_start|>assistant\n"
    # The template closes a turn that was cut off. The policy did not write that token.
    assert before[2] == (
        f"{before[1]}two</s>\n<|im_start|>tool\nx</s>\n<|im_start|>user\ny</s>\n"
        "<|im_start|>assistant\n"
    )
    episode = Episode(client, None)
    response = shown(tokenizer, episode.transcript.response)
    assert opened + response == before[2] + "three</s>"
    written = shown(tokenizer, episode.transcript.response[episode.mask])
    assert written == "one</s>twothree</s>"
    ends = client.transcript.turn_ends().tolist()
    last = [shown(tokenizer, episode.transcript.response[:end]) for end in ends]
    assert [text[-7:] for text in last] == ["one</s>", "ant\ntwo", "ree</s>"]
    assert client.messages[1:3] == [
        {"role": "assistant", "content": "one"},
        {"role": "user", "content": "more"},
    ]


def test_a_template_that_drops_earlier_words_begins_a_branch(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(FORGETFUL)
    tokenizer = load_tokenizer(folder / "tokenizer.model")
    texts = ("a b", "c!d", "e", "f!g")
    client, asked = client_of(tokenizer, [(text, False) for text in texts])
    more: list[Message] = [{"role": "user", "content": "more"}]

    async def play() -> None:
        await client.generate()
        for _ in texts[1:]:
            await client.generate(more)

    asyncio.run(play())
    opened, between = "<|im_start|>user\nhi</s>\n<|im_start|>assistant\n", "\n<|im_start|>user\n"
    between += "more</s>\n<|im_start|>assistant\n"
    before = [shown(tokenizer, each.token_ids) for each in asked]
    assert before[1] == f"{opened}a b</s>{between}"
    assert before[2] == f"{opened}a b</s>{between}d</s>{between}"  # "c!" is gone
    assert before[3] == f"{before[2]}e</s>{between}"
    first, second = client.transcript.branches()
    assert (first.turns, second.turns) == (range(2), range(2, 4))
    assert shown(tokenizer, second.prompt) == before[2]
    assert client.transcript.context == (*asked[3].token_ids, *client.transcript.turns[3].token_ids)

    episode = Episode(client, None)
    ids, in_response = episode.transcript.sequence
    assert shown(tokenizer, ids) == f"{before[1]}c!d</s>{before[3]}f!g</s>"
    assert ids[in_response].tolist() == episode.transcript.response.tolist()
    # The response contains no prompt of a branch, and contains every sampled token once.
    assert (
        shown(tokenizer, episode.transcript.response[episode.mask]) == "a b</s>c!d</s>e</s>f!g</s>"
    )
    assert len(ids) - in_response.sum() == len(asked[0].token_ids) + len(asked[2].token_ids)


def test_a_branch_describes_the_tools_of_the_row(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{- tools[0].name -}}" + FORGETFUL)
    tokenizer = load_tokenizer(folder / "tokenizer.model")
    turns = [("c!d", False), ("e", False)]
    client, asked = client_of(tokenizer, turns, tools=({"name": "add"},))

    async def play() -> None:
        await client.generate()
        await client.generate([{"role": "user", "content": "more"}])

    asyncio.run(play())
    assert len(client.transcript.branches()) == 2  # "c!" is gone
    assert all(shown(tokenizer, each.token_ids).startswith("add<|im_start|>") for each in asked)


def test_a_prompt_of_the_environment_begins_a_branch(tokenizer: Tokenizer) -> None:
    client, asked = client_of(tokenizer, [("one", False)] * 4, EpisodeLimits(9, 40))
    short: list[Message] = [{"role": "user", "content": "so far one"}]

    async def play() -> None:
        await client.generate()
        client.begin(short)
        client.begin(short)  # only the last call before a turn counts
        await client.generate()
        await client.generate(text="abc")
        # Each branch has its own limit of length, so the whole episode may exceed it.
        client.begin([{"role": "user", "content": "x" * 60}])
        await client.generate()

    with pytest.raises(LimitReached):
        asyncio.run(play())
    assert client.is_cut and len(client.transcript.turns) == 3
    opened = "<|im_start|>user\nso far one</s>\n<|im_start|>assistant\n"
    assert shown(tokenizer, asked[1].token_ids) == opened
    assert [branch.turns for branch in client.transcript.branches()] == [range(1), range(1, 3)]
    extra = len(asked[1].token_ids) - len(asked[0].token_ids)
    assert [each.max_tokens for each in asked] == [40, 40 - extra, 40 - extra - 4 - 3]
    ids, in_response = client.transcript.sequence
    assert shown(tokenizer, ids[~in_response]) == (
        "<|im_start|>user\nhi</s>\n<|im_start|>assistant\n" + opened
    )


@pytest.mark.parametrize(
    ("limits", "turns", "tokens"), [(EpisodeLimits(2, 200), 2, None), (EpisodeLimits(9, 12), 2, 12)]
)
def test_limits_end_an_episode(
    tokenizer: Tokenizer, limits: EpisodeLimits, turns: int, tokens: int | None
) -> None:
    client, asked = client_of(tokenizer, [("abc", False)] * 9, limits)

    async def play() -> None:
        await client.generate()
        while True:
            await client.generate(text="123")

    with pytest.raises(LimitReached):
        asyncio.run(play())
    assert len(client.transcript.turns) == turns and client.is_cut
    # A turn has 4 tokens, and 3 tokens are between two turns. The second turn has room for 5
    # tokens. A third turn has no room.
    assert [each.max_tokens for each in asked] == [
        limits.response_tokens,
        limits.response_tokens - 7,
    ]
    assert client.tokens_left == limits.response_tokens - 11


def test_a_limit_of_the_environment_cuts_its_turn_only(tokenizer: Tokenizer) -> None:
    client, asked = client_of(tokenizer, [("abc", False)])
    turn = asyncio.run(client.generate(max_tokens=2))
    assert (turn.text, turn.truncated, asked[0].max_tokens) == ("ab", True, 2)
    assert not client.is_cut


def of(body: Callable[[Client], Any], **facts: Any) -> Any:
    """An environment whose `rollout` calls `body`."""

    async def rollout(self: Any, client: Client, task: Prompt) -> Any:
        return await body(client)

    return type("Mine", (), {"rollout": rollout, **facts})()


async def once(client: Client) -> None:
    await client.generate()


async def never(client: Client) -> None:
    pass


async def raises(client: Client) -> None:
    await client.generate()
    raise KeyError("no tool")


async def number(client: Client) -> float:
    await client.generate()
    return 1.0


async def both(client: Client) -> Trajectory:
    await client.generate()
    return Trajectory(1.0, [1.0])


async def too_many(client: Client) -> Trajectory:
    await client.generate()
    return Trajectory(turn_rewards=[1.0, 2.0])


async def text_first(client: Client) -> None:
    await client.generate(text="a")


async def nothing_between(client: Client) -> None:
    await client.generate()
    await client.generate()


async def no_room(client: Client) -> None:
    await client.generate(max_tokens=-1)


async def no_room_at_all(client: Client) -> None:
    await client.generate(max_tokens=0)


async def too_early(client: Client) -> None:
    turn = asyncio.ensure_future(client.generate())
    await asyncio.sleep(0)
    try:
        client.begin([{"role": "user", "content": "abc"}])
    finally:
        await turn


async def together(client: Client) -> None:
    await asyncio.gather(client.generate(), client.generate())


async def endless(client: Client) -> Trajectory:
    await client.generate()
    while True:
        await client.generate(text="12")


async def too_fast(client: Client) -> None:
    raise LimitReached


async def endless_number(client: Client) -> Trajectory:
    await client.generate()
    return Trajectory(reward=float("nan"))


async def no_list(client: Client) -> Trajectory:
    await client.generate()
    return Trajectory(turn_rewards=5)  # ty: ignore[invalid-argument-type]  # on purpose


async def exits(client: Client) -> None:
    sys.exit(3)


async def cancels(client: Client) -> None:
    raise asyncio.CancelledError


async def stops(client: Client) -> None:
    raise GeneratorExit


async def in_turns(client: Client) -> Trajectory:
    await client.generate()
    await client.generate(text="12")
    return Trajectory(turn_rewards=[0.5, 2.0])


@pytest.mark.parametrize(
    ("body", "facts", "problem"),
    [
        (never, {}, "ended without a turn"),
        (raises, {}, "KeyError: 'no tool' (test_episode.py:"),
        (number, {}, "rollout returned a float"),
        (both, {}, "not both"),
        (too_many, {}, "2 turn_rewards for 1 turns"),
        (no_list, {}, "turn_rewards has type int; allowed: a list"),
        (text_first, {}, "nothing may come between the prompt and the first turn"),
        (nothing_between, {}, "between two turns there must be either messages or a text"),
        (no_room, {}, "max_tokens = -1; allowed: 1 or more"),
        (no_room_at_all, {}, "max_tokens = 0; allowed: 1 or more"),
        (together, {}, "generate was called again before"),
        (too_early, {}, "begin was called before"),
        (once, {"gives_rewards": True}, "returned no reward"),
        (endless, {"gives_rewards": True}, "rollout has to catch LimitReached"),
        (too_fast, {}, "ended without a turn"),
        (endless_number, {}, "rollout gave as reward nan; a finite number is wanted"),
        (exits, {}, "rollout ended with SystemExit(3)"),
        (cancels, {}, "rollout ended with CancelledError()"),
        (stops, {}, "rollout ended with GeneratorExit()"),
    ],
)
def test_faults_of_an_environment_are_named(
    tokenizer: Tokenizer, body: Any, facts: dict[str, Any], problem: str
) -> None:
    client, _ = client_of(tokenizer, [("abc", False)] * 2, EpisodeLimits(2, 200))
    runner = EpisodeRunner(of(body, **facts), tokenizer, client.limits)
    episode = asyncio.run(runner.run(client.task, client.write))
    message = str(episode.error)
    assert message.startswith("environment Mine: ") and message.endswith("; f:1")
    assert problem in message
    assert len(episode.transcript.response) == len(episode.mask) > 0 and not episode.mask.any()


def test_rewards_of_turns_end_where_the_turns_do(tokenizer: Tokenizer) -> None:
    client, _ = client_of(tokenizer, [("abc", False)] * 2)
    runner = EpisodeRunner(of(in_turns), tokenizer, client.limits)
    episode = asyncio.run(runner.run(client.task, client.write))
    assert isinstance(episode.given, TurnRewards) and episode.error is None
    assert (list(episode.given.rewards), list(episode.given.ends)) == ([0.5, 2.0], [4, 10])
    assert episode.mask.tolist() == [True] * 4 + [False] * 2 + [True] * 4


def test_a_limit_without_rewards_of_the_environment_leaves_the_episode_to_the_reward_function(
    tokenizer: Tokenizer,
) -> None:
    client, _ = client_of(tokenizer, [("abc", False)] * 2, EpisodeLimits(2, 200))
    runner = EpisodeRunner(of(endless), tokenizer, client.limits)
    episode = asyncio.run(runner.run(client.task, client.write))
    assert episode.error is None and episode.given is None and episode.client.is_cut


def documented() -> Any:
    """The environment at the beginning of docs/environments.md."""
    page = Path(__file__).parents[3] / "docs" / "environments.md"
    code = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)[0]
    place: dict[str, Any] = {}
    exec(code, place)
    return place["HigherOrLower"]()


@pytest.mark.parametrize(
    ("turns", "limits", "reward", "cut"),
    [
        (["1", "9", "there"], EpisodeLimits(5, 400), 1.0, False),
        (["1", "9", "there"], EpisodeLimits(2, 400), 0.0, False),
        (["1", "9", "there"], EpisodeLimits(5, 12), 0.0, True),
    ],
    ids=["right", "no turn is left", "no token is left"],
)
def test_the_documented_environment_gives_every_episode_its_reward(
    tokenizer: Tokenizer, turns: list[str], limits: EpisodeLimits, reward: float, cut: bool
) -> None:
    environment = documented()
    assert environment.gives_rewards
    client, _ = client_of(tokenizer, [(text, False) for text in turns], limits)
    episode = asyncio.run(
        EpisodeRunner(environment, tokenizer, limits).run(client.task, client.write)
    )
    assert episode.error is None and episode.given == reward and episode.client.is_cut is cut


def test_what_an_environment_changes_is_its_own(tokenizer: Tokenizer) -> None:
    """The environment may change its task and its conversation, and may reuse message objects.
    Other episodes do not see these changes."""
    hint = {"role": "user", "content": "lower"}

    async def rollout(client: Client, task: Prompt) -> Trajectory:
        task.fields["tests"].append(1)
        task.answer["value"] += 1
        task.messages[0]["content"] += " (hint)"  # type: ignore[index]
        client.messages[0]["content"] += "!"  # type: ignore[index]
        client.messages.clear()
        await client.generate()
        hint["content"] = "lower"
        await client.generate([hint])
        hint["content"] = "higher"
        await client.generate([hint])
        assert [each["content"] for each in client.messages] == [
            "hi",
            "a",
            "lower",
            "b",
            "higher",
            "c",
        ]
        return Trajectory(reward=float(len(task.fields["tests"]) + task.answer["value"]))

    class Mine:
        async def rollout(self, client: Client, task: Prompt) -> Trajectory:
            return await rollout(client, task)

    client, asked = client_of(tokenizer, [("a", False), ("b", False), ("c", False)])
    messages: tuple[Message, ...] = ({"role": "user", "content": "hi"},)
    fields: dict[str, Any] = {"tests": []}
    task = replace(client.task, fields=fields, answer={"value": 0}, messages=messages)
    runner = EpisodeRunner(Mine(), tokenizer, client.limits)
    for _ in range(2):
        episode = asyncio.run(runner.run(task, client.write))
        assert episode.error is None and episode.given == 2.0
        assert [b.turns for b in episode.client.transcript.branches()] == [range(3)]
    assert task.fields == {"tests": []} and task.answer == {"value": 0}
    assert task.messages == ({"role": "user", "content": "hi"},)
    assert [shown(tokenizer, each.token_ids) for each in asked[:3]] == [
        shown(tokenizer, each.token_ids) for each in asked[3:]
    ]
    assert "hint" not in shown(tokenizer, asked[0].token_ids)


def test_an_engine_that_is_gone_is_no_fault_of_the_episode(tokenizer: Tokenizer) -> None:
    client, _ = client_of(tokenizer, [])

    async def write(_: TurnRequest) -> Written:
        raise RolloutError("no server is left")

    with pytest.raises(RolloutError, match="no server"):
        asyncio.run(EpisodeRunner(of(once), tokenizer, client.limits).run(client.task, write))


async def catches_all(client: Client) -> Trajectory:
    try:
        turn = await client.generate()
        return Trajectory(reward=float(turn.text))
    except ValueError:  # no number; also an error of the engine, which is a ValueError
        return Trajectory(reward=0.0)


async def fails_after_it(client: Client) -> Trajectory:
    try:
        await client.generate()
    finally:
        raise KeyError("no turn")


@pytest.mark.parametrize("body", [catches_all, fails_after_it])
def test_an_error_of_the_engine_that_an_environment_catches_is_no_reward(
    tokenizer: Tokenizer, body: Any
) -> None:
    client, _ = client_of(tokenizer, [])

    async def write(_: TurnRequest) -> Written:
        raise RolloutError("no server is left")

    with pytest.raises(RolloutError, match="no server"):
        asyncio.run(EpisodeRunner(of(body), tokenizer, client.limits).run(client.task, write))


def test_environments_are_found_by_name_or_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "found_games.py").write_text(
        "class Game:\n"
        "    def __init__(self, *, level: int = 1):\n"
        "        if level > 3:\n"
        "            raise ValueError('level is at most 3')\n"
        "        self.level = level\n"
        "    async def rollout(self, client, task):\n"
        "        await client.generate()\n"
        "class Empty:\n"
        "    pass\n"
        "class Plain:\n"
        "    def rollout(self, client, task):\n"
        "        pass\n"
        "class OneArgument:\n"
        "    async def rollout(self, client):\n"
        "        pass\n"
        "class Broken:\n"
        "    def __init__(self):\n"
        "        raise KeyError('DATA')\n"
        "    rollout = Game.rollout\n"
        "class Exits(Broken):\n"
        "    def __init__(self):\n"
        "        raise SystemExit(0)\n"
        "async def play(client, task):\n"
        "    pass\n"
        "level = 3\n"
    )
    assert get_environment("single_turn") is None
    assert get_environment("any", "found_games:Game", {"level": 2}).level == 2
    wrong: list[tuple[str, str | None, dict[str, Any], str]] = [
        ("chess", None, {}, "no such environment; allowed: agent, single_turn"),
        (
            "",
            "found_games:Chess",
            {},
            "games has no class Chess; it has: Game, Empty, Plain, OneArg",
        ),
        ("", "found_games:Gane", {}, "has no class Gane; it has: Game$"),
        ("", "found_games:play", {}, "is a function; allowed: a class with async def rollout"),
        ("", "found_games:level", {}, "games has no class level"),
        (
            "",
            "found_games:Plain",
            {},
            "its method rollout is no coroutine; allowed: async def rollout",
        ),
        ("", "found_games:OneArgument", {}, r"its method is rollout\(client\); allowed: async def"),
        ("", "found_games:Broken", {}, r"making it failed: KeyError: 'DATA' \(found_games.py:"),
        ("", "found_games:Exits", {}, r"making it failed: SystemExit: 0 \(found_games.py:"),
        ("", "found_games:Empty", {}, "has no method rollout"),
        ("", "found_games:Game", {"levels": 2}, "no such option; allowed: level"),
        ("", "found_games:Game", {"level": "a"}, "wrong type; int is wanted"),
        ("", "found_games:Game", {"level": 4}, "level is at most 3"),
        ("single_turn", None, {"level": 4}, "it takes none"),
        ("agent", None, {"command": "true", "seconds": 0}, "options.seconds = 0: allowed: a fin"),
    ]
    for name, path, options, problem in wrong:
        with pytest.raises(EpisodeError, match=problem):
            get_environment(name, path, options)
