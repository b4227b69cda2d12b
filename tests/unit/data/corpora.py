"""Small texts and tokenizers for the tests of data."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import sentencepiece
from pyarrow import parquet
from tokenizers import models

from gspo_megatron.config import load_config
from gspo_megatron.data.character_tokenizer import (
    CHATML_SYMBOLS,
    for_transformers,
    write_character_tokenizer,
)
from gspo_megatron.data.tokenizers import Tokenizer, load_tokenizer, train_sentencepiece
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


def load(tmp_path: Path, schema: type, **data: object) -> Any:
    """Load a configuration of this kind with these keys of its section data."""
    (tmp_path / "config.yaml").write_text("{}\n")
    words = [f"data.{key}={value}" for key, value in data.items()]
    return load_config(tmp_path / "config.yaml", words, schema)


def write_jsonl(path: Path, texts: Sequence[str], field: str = "text") -> Path:
    return write_rows(path, [{field: text, "n": n} for n, text in enumerate(texts)])


def write_rows(path: Path, rows: Sequence[object]) -> Path:
    """Write a JSON Lines file of these rows. A row of bytes is written as it is."""
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def make_tokenizer(
    folder: Path,
    kind: str = "bpe",
    vocab_size: int = 500,
    byte_fallback: bool = True,
    user_symbols: Sequence[str] = ("<sep>", "\n\n", "||"),
) -> Path:
    """The folder of a tokenizer of the kind char or bpe, with ChatML and a few symbols."""
    texts = make_texts(300, seed=5)
    symbols = {**CHATML_SYMBOLS, "control_symbols": ("<|doc|>", "<|im_start|>")}
    model = write_character_tokenizer(
        *(folder, texts, vocab_size),
        byte_fallback=byte_fallback,
        user_symbols=user_symbols,
        **symbols,
    )
    if kind == "bpe":
        used = ["<unk>", "<pad>", symbols["eos_symbol"], *symbols["control_symbols"], *user_symbols]
        required = "\n" + "".join(used) + "<0x123456789ABCDEF>" * byte_fallback
        train_sentencepiece(
            [line for text in texts for line in text.split("\n") if line],
            vocab_size,
            folder / "tokenizer",
            kind,
            byte_fallback=byte_fallback,
            eos_piece=symbols["eos_symbol"],
            control_symbols=list(symbols["control_symbols"]),
            user_defined_symbols=list(user_symbols),
            required_chars="".join(sorted({*required} - {*user_symbols})),
        )
        tokenizer = for_transformers(model, user_symbols)
        tokenizer.model = models.BPE(
            tokenizer.get_vocab(),
            _merges(model, user_symbols),
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=byte_fallback,
        )
        tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def _merges(model: Path, user_symbols: Sequence[str]) -> list[tuple[str, str]]:
    """The merges of pieces, in the order of sentencepiece: any two neighbours that form a piece are
    joined, and the best piece comes first."""
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.read_bytes())
    scores = {
        processor.id_to_piece(n): processor.get_score(n)
        for n in range(processor.get_piece_size())
        if not (processor.is_control(n) or processor.is_unknown(n) or processor.is_byte(n))
    }
    for symbol in user_symbols:
        del scores[symbol]
    return [
        (piece[:cut], piece[cut:])
        for piece in sorted(scores, key=scores.__getitem__, reverse=True)
        for cut in range(len(piece) - 1, 0, -1)
        if piece[:cut] in scores and piece[cut:] in scores
    ]


def both(folder: Path) -> list[Tokenizer]:
    """Load both forms of a tokenizer: the sentencepiece model and the folder."""
    return [load_tokenizer(folder), load_tokenizer(folder / "tokenizer.model")]


def write_parquet(path: Path, columns: dict[str, Any], **options: Any) -> Path:
    parquet.write_table(pyarrow.table(columns), path, **options)
    return path


def refusal(call: Callable[..., object], *arguments: Any, **keywords: Any) -> list[str]:
    """The lines of the DataError or RewardError that a call raises."""
    with pytest.raises((DataError, RewardError)) as caught:
        call(*arguments, **keywords)
    return str(caught.value).splitlines()
