"""A tokenizer whose tokens are characters, so that episodes can be read."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from gspo_megatron.data.chat import CHATML
from gspo_megatron.data.tokenizers import Tokenizer, load_tokenizer, train_sentencepiece

CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789 \n!"


def shown(tokenizer: Tokenizer, ids: Iterable[int]) -> str:
    """The text with special tokens."""
    names = {number: name for name, number in tokenizer.special_tokens.items()}
    return "".join(names.get(int(n)) or tokenizer.decode([int(n)]) for n in ids)


def character_tokenizer(folder: Path, *symbols: str, template: str = CHATML) -> Tokenizer:
    """Make a tokenizer whose pieces are characters. Its files are in `folder`.

    symbols: control tokens in addition to those of the template.
    """
    lines = [CHARACTERS.replace("\n", " "), "a!b\nc"] * 9
    symbols = ("<|im_start|>", *symbols)
    train_sentencepiece(lines, 60, folder / "tokenizer", "char", control_symbols=list(symbols))
    (folder / "chat_template.jinja").write_text(template)
    return load_tokenizer(folder / "tokenizer.model")
