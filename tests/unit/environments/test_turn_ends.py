"""The text that the template adds after a turn, if there are several end-of-sequence tokens."""

from __future__ import annotations

import asyncio
import json

import pytest

from gspo_megatron.data.tokenizers import Tokenizer, load_tokenizer
from gspo_megatron.environments.episode import Client, EpisodeLimits, TurnRequest
from gspo_megatron.environments.transcript import Written
from gspo_megatron.types import Message, Prompt
from tests.unit.environments.characters import character_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer whose template ends a turn with </s>. A response may also end with <|end|>."""
    folder = tmp_path_factory.mktemp("ends")
    plain = character_tokenizer(folder, "<|end|>")
    ends = [plain.eos_id, plain.special_tokens["<|end|>"]]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    found = load_tokenizer(folder / "tokenizer.model")
    assert set(found.eos_ids) == {*ends} and found.eos_id == plain.eos_id
    return found


@pytest.mark.parametrize(
    ("last", "after"),
    [
        ("</s>", ""),  # the template does not repeat the policy's token
        ("<|end|>", "</s>"),  # the template still adds its own token
        (None, "</s>"),  # the turn was cut off
    ],
)
def test_the_template_closes_a_turn_that_has_not_its_token(
    tokenizer: Tokenizer, last: str | None, after: str
) -> None:
    ids = tokenizer.encode("one") + ([] if last is None else [tokenizer.special_tokens[last]])
    asked: list[TurnRequest] = []

    async def write(wanted: TurnRequest) -> Written:
        asked.append(wanted)
        return Written(ids, truncated=last is None)

    messages: tuple[Message, ...] = ({"role": "user", "content": "hi"},)
    rendered = tokenizer.render(messages, open_answer=True)
    prompt = tuple(tokenizer.encode_rendered(rendered.text).ids)
    client = Client(
        Prompt("hi", "", "f:1", token_ids=prompt, messages=messages),
        EpisodeLimits(9, 200),
        tokenizer,
        write,
    )

    async def play() -> str:
        turn = await client.generate(max_tokens=len(ids))
        await client.generate([{"role": "user", "content": "more"}])
        return turn.text

    assert asyncio.run(play()) == "one"  # the text of a turn has no end token
    between = tokenizer.encode_rendered(
        f"{after}\n<|im_start|>user\nmore</s>\n<|im_start|>assistant\n"
    ).ids
    assert list(asked[1].token_ids) == [*prompt, *ids, *between]
    assert len(client.transcript.branches()) == 1
