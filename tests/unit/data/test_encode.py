from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from gspo_megatron.data.encode import encode_prompts
from gspo_megatron.data.tokenizers import Encoded
from gspo_megatron.errors import DataError
from gspo_megatron.types import Prompt


class CodePoints:
    """A tokenizer by hand: ids are code points."""

    name = "by hand"
    vocab_size = 256
    eos_id = 2
    pad_id = 1

    def __init__(self, bos_id: int | None = None) -> None:
        self.bos_id = bos_id

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))

    def encode_rendered(self, text: str) -> Encoded:
        return Encoded(self.encode(text), [*range(len(text))], [*range(1, len(text) + 1)])

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]]) -> str:
        return "".join(f"[{m['role']}]{m['content']}" for m in messages) + "[assistant]"


def prompt(text: str, line: int = 1) -> Prompt:
    return Prompt(text=text, answer="x", source=f"p.jsonl:{line}", fields={"task": "t"})


def test_token_ids_are_filled_in_and_all_else_kept() -> None:
    encoded = encode_prompts([prompt("ab"), prompt("c", 2)], CodePoints(), 2)
    assert [each.token_ids for each in encoded] == [(97, 98), (99,)]
    assert encoded[1].source == "p.jsonl:2"
    assert encoded[1].fields == {"task": "t"}


def test_beginning_token_goes_first_and_counts() -> None:
    assert encode_prompts([prompt("ab")], CodePoints(bos_id=5), 3)[0].token_ids == (5, 97, 98)
    with pytest.raises(DataError, match="has 3 tokens; at most 2"):
        encode_prompts([prompt("ab")], CodePoints(bos_id=5), 2)


def test_chat_template_wraps_the_text_without_another_beginning_token() -> None:
    tokenizer = CodePoints(bos_id=5)
    (encoded,) = encode_prompts([prompt("ab")], tokenizer, 99, chat_template=True)
    assert tokenizer.decode(encoded.token_ids) == "[user]ab[assistant]"
    assert encoded.text == "ab"


def test_all_bad_prompts_are_named_with_their_lengths() -> None:
    prompts = [prompt("abcd", 1), prompt("ok", 2), prompt(" ", 3), prompt("abcde", 4)]
    with pytest.raises(DataError) as caught:
        encode_prompts(prompts, CodePoints(), 3)
    allowed = "tokens; at most 3 are allowed (data.max_prompt_tokens)"
    assert str(caught.value).splitlines() == [
        f"p.jsonl:1: the prompt has 4 {allowed}",
        "p.jsonl:3: the prompt is empty",
        f"p.jsonl:4: the prompt has 5 {allowed}",
    ]
