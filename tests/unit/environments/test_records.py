"""Records of episodes for readers: the turns, their roles, and their rewards."""

from __future__ import annotations

import asyncio
import datetime
import json
from decimal import Decimal
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from gspo_megatron.data.tokenizers import Tokenizer
from gspo_megatron.environments.episode import (
    Client,
    Episode,
    EpisodeLimits,
    EpisodeRunner,
    Trajectory,
    TurnRequest,
)
from gspo_megatron.environments.records import record_of, records_of
from gspo_megatron.environments.transcript import Written
from gspo_megatron.rewards.values import Score, checked
from gspo_megatron.types import Prompt
from tests.unit.environments.characters import character_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return character_tokenizer(tmp_path_factory.mktemp("letters"))


def played(
    tokenizer: Tokenizer, environment: Any, turns: list[list[int]], chat: bool = True
) -> Episode:
    messages = ({"role": "user", "content": "guess"},) if chat else ()
    ids = tokenizer.encode("guess")
    if chat:
        ids = tokenizer.encode_rendered(tokenizer.render(messages, open_answer=True).text).ids
    task = Prompt("guess", "3", "f:1", token_ids=tuple(ids), messages=messages)

    async def write(wanted: TurnRequest) -> Written:
        await asyncio.sleep(0)
        return Written(turns[wanted.turn], False, source=wanted.turn)

    return asyncio.run(
        EpisodeRunner(environment, tokenizer, EpisodeLimits(9, 400)).run(task, write)
    )


class Guessing:
    def __init__(self, fails: bool = False) -> None:
        self.fails = fails

    async def rollout(self, client: Client, task: Prompt) -> Trajectory:
        await client.generate()
        await client.generate([{"role": "user", "content": "lower"}])
        if self.fails:
            raise ConnectionError("no tool")
        client.begin([{"role": "system", "content": "so far 2"}])
        await client.generate()
        return Trajectory(turn_rewards=[0.1, -0.5, 1.0])


def test_turns_have_their_roles_texts_and_rewards(tokenizer: Tokenizer) -> None:
    """The policy writes text that looks like a user's turn. The record still shows it as the
    policy's."""
    start, eos = tokenizer.special_tokens["<|im_start|>"], tokenizer.eos_id
    pretends = [*tokenizer.encode("4 user lower"), start, *tokenizer.encode("user"), eos]
    turns = [pretends, [*tokenizer.encode("7"), eos], [*tokenizer.encode("3"), eos]]
    episode = played(tokenizer, Guessing(), turns)
    record = record_of(episode, checked(episode.given, len(episode.transcript.response)))
    assert record["error"] is None
    told = [(turn["role"], turn["text"], turn["branch"]) for turn in record["turns"]]
    assert told == [
        ("user", "guess", 0),
        ("assistant", "4 user lower<|im_start|>user</s>", 0),
        ("user", "lower", 0),
        ("assistant", "7</s>", 0),
        ("system", "so far 2", 1),
        ("assistant", "3</s>", 1),
    ]
    mine = [turn for turn in record["turns"] if turn["role"] == "assistant"]
    assert [turn["reward"] for turn in mine] == [0.1, -0.5, 1.0]
    assert [turn["trained"] for turn in record["turns"]] == [False, True] * 3
    whole = record_of(episode, Score(np.array([0.6])))
    assert {turn.get("reward") for turn in whole["turns"]} == {None}


def test_a_failed_episode_has_its_turns_and_its_cause(tokenizer: Tokenizer) -> None:
    turns = [[*tokenizer.encode(n), tokenizer.eos_id] for n in "47"]
    record = record_of(played(tokenizer, Guessing(fails=True), turns), None)
    assert "ConnectionError: no tool" in record["error"] and record["error"].endswith("; f:1")
    assert [turn["text"] for turn in record["turns"]] == ["guess", "4</s>", "lower", "7</s>"]
    assert not any(turn["trained"] for turn in record["turns"])

    class AtOnce:
        async def rollout(self, client: Client, task: Prompt) -> None:
            raise ConnectionError("no tool")

    record = record_of(played(tokenizer, AtOnce(), []), None)
    assert [turn["text"] for turn in record["turns"]] == ["guess"]


class Silent:
    """A value that has no text form."""

    def __str__(self) -> str:
        raise ValueError("silent")


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (np.int64(7), "7"),
        (np.arange(3), "[0, 1, 2]"),
        (Decimal("1.50"), "1.50"),
        (datetime.date(2025, 1, 31), "2025-01-31"),
        ({np.int64(1): (Decimal(2), None)}, '{"1": ["2", null]}'),
        ([{"type": "text", "text": "é"}], '[{"type": "text", "text": "é"}]'),
        (None, ""),
        pytest.param(10**5000, "(int)", id="many digits"),
        (Silent(), "(Silent)"),
    ],
)
def test_a_message_may_hold_what_json_lacks(tokenizer: Tokenizer, content: Any, text: str) -> None:
    """A tool may return numpy numbers. The record is valid JSON in any case."""
    looped: list[Any] = []
    looped.append(looped)
    told = {"role": "tool", "content": content, "tool_calls": [{"arguments": {"n": content}}]}
    own = SimpleNamespace(role="tool", content=content)
    turn = Written((tokenizer.eos_id,), truncated=False, source=0)
    task = Prompt("guess", "3", "f:1", token_ids=(1,))
    client = Client(task, EpisodeLimits(9, 400), tokenizer, cast(Any, None))
    client.transcript.turns, client.transcript.between = [turn], [()]
    client.conversation.added = [cast(Any, [told, own, {"role": "user", "content": looped}])]
    record = record_of(Episode(client, 1.0), Score(np.array([1.0])))
    said = record["turns"][:3]
    assert [turn["text"] for turn in said] == [text, text, "(list)"]
    assert [turn["role"] for turn in said] == ["tool", "tool", "user"]
    assert "tool_calls" in said[0] and "tool_calls" not in said[1]
    assert json.loads(json.dumps(record)) == record


def test_without_messages_the_text_between_is_the_environment_s(tokenizer: Tokenizer) -> None:
    class Texts:
        async def rollout(self, client: Client, task: Prompt) -> None:
            await client.generate()
            await client.generate(text=" 12 ")

    turns = [[*tokenizer.encode(n), tokenizer.eos_id] for n in "47"]
    record = record_of(played(tokenizer, Texts(), turns, chat=False), None)
    told = [(turn["role"], turn["text"]) for turn in record["turns"]]
    assert told == [
        ("prompt", "guess"),
        ("assistant", "4</s>"),
        ("environment", " 12 "),
        ("assistant", "7</s>"),
    ]


def test_a_step_makes_only_the_records_that_it_writes(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step has hundreds of episodes, but writes only logging.samples_per_step of them."""
    episodes = [played(tokenizer, Guessing(), [tokenizer.encode("5")] * 3) for _ in range(4)]
    expected = [record_of(episode, None) for episode in episodes]
    decoded: list[int] = []
    kind, decode = type(tokenizer), tokenizer.decode
    monkeypatch.setattr(kind, "decode", lambda _, ids: decoded.append(1) or decode(ids))
    records = records_of(episodes, [None] * 4)
    assert (len(records), decoded) == (4, [])
    assert records[:1] == expected[:1]
    of_one = len(decoded)
    assert list(records) == expected and len(decoded) == 5 * of_one > 0
    assert not records_of([], [])
