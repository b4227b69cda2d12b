"""Small texts and tokenizers for the tests of data."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from gspo_megatron.data.tokenizer_training import TokenizerRecipe, train_tokenizer, with_chatml
from gspo_megatron.data.tokenizers import Tokenizer, load_tokenizer
from gspo_megatron.errors import DataError, RewardError

SYLLABLES = ("ka", "lo", "mi", "ster", "ung", "é", "ß", "qu", "ax", "or", "日", "本", "-", "don't")


def make_texts(count: int, seed: int, words: int = 40) -> list[str]:
    """Documents of made-up words with white space of several kinds."""
    source = random.Random(seed)
    vocabulary = ["".join(source.choices(SYLLABLES, k=source.randint(1, 3))) for _ in range(300)]
    texts = []
    for _ in range(count):
        chosen = source.choices(vocabulary, k=source.randint(1, words))
        gaps = source.choices((" ", " ", " ", ", ", "\n", "  ", "\t"), k=len(chosen))
        texts.append("".join(word + gap for word, gap in zip(chosen, gaps, strict=True)))
    return texts


def write_jsonl(path: Path, texts: Sequence[str], field: str = "text") -> Path:
    return write_rows(path, [{field: text, "n": n} for n, text in enumerate(texts)])


def write_rows(path: Path, rows: Sequence[object]) -> Path:
    """A JSON Lines file of these rows; bytes are written as they are."""
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def make_tokenizer(folder: Path, model_type: str = "unigram", **recipe: object) -> Path:
    """A tokenizer folder of 500 ids with ChatML and a few symbols."""
    corpus = write_jsonl(folder.parent / f"{folder.name}-corpus.jsonl", make_texts(300, seed=5))
    settings = {
        "vocab_size": 500,
        "model_type": model_type,
        "user_symbols": ("<sep>", "\n\n", "||"),
        "control_symbols": ("<|doc|>",),
        **recipe,
    }
    train_tokenizer([corpus], folder, with_chatml(TokenizerRecipe(**settings)))  # type: ignore[arg-type]
    return folder


def both(folder: Path) -> list[Tokenizer]:
    """The two forms of a tokenizer."""
    return [load_tokenizer(folder), load_tokenizer(folder / "tokenizer.model")]


def write_parquet(path: Path, columns: dict[str, Any], **options: Any) -> Path:
    parquet.write_table(pyarrow.table(columns), path, **options)
    return path


def refusal(call: Callable[..., object], *arguments: Any, **keywords: Any) -> list[str]:
    """The lines of the DataError or RewardError that a call ends with."""
    with pytest.raises((DataError, RewardError)) as caught:
        call(*arguments, **keywords)
    return str(caught.value).splitlines()
