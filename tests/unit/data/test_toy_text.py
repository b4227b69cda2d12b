from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from gspo_megatron.data.toy_text import PAIRS, Sizes, generate_text, main, write_toy_text
from gspo_megatron.errors import DataError

SIZES = Sizes(documents=200, held_out=20, conversations=60, train=150, test=80)


def numbers_of(text: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", text)]


def sentences_of(text: str) -> list[str]:
    """Each with its three numbers."""
    numbers = re.findall(r"[^\d]*\d+[^\d]*\d+[^\d]*\d+", text)
    assert len(numbers) * 3 == len(numbers_of(text))
    return numbers


def pair_of(text: str) -> frozenset[int]:
    """The two numbers that are added: the greatest of three is their sum."""
    return frozenset(sorted(numbers_of(text))[:2])


def test_every_sentence_is_true() -> None:
    files = generate_text(SIZES, seed=3)
    sentences = [s for row in files["corpus.jsonl"] for s in sentences_of(row["text"])]
    assert len(sentences) > 1000
    for sentence in sentences:
        small, middle, large = sorted(numbers_of(sentence))
        assert small + middle == large, sentence
    for row in [*files["train.jsonl"], *files["test.jsonl"]]:
        assert sum(numbers_of(row["prompt"])) == int(row["answer"])


def test_no_pair_of_the_test_is_anywhere_else() -> None:
    files = generate_text(SIZES, seed=4)
    tested = {frozenset(numbers_of(row["prompt"])) for row in files["test.jsonl"]}
    assert len(tested) == SIZES.test
    elsewhere = {
        pair_of(sentence)
        for name in ("corpus.jsonl", "held_out.jsonl")
        for row in files[name]
        for sentence in sentences_of(row["text"])
    }
    elsewhere |= {frozenset(numbers_of(row["prompt"])) for row in files["train.jsonl"]}
    elsewhere |= {
        frozenset(numbers_of(row["messages"][0]["content"])) for row in files["sft.jsonl"]
    }
    assert len(elsewhere) > PAIRS // 2
    assert not tested & elsewhere


def test_files_depend_on_the_seed_alone(tmp_path: Path) -> None:
    one, same, other = (
        [path.read_bytes() for path in write_toy_text(tmp_path / name, SIZES, seed)]
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert one == same
    assert all(mine != theirs for mine, theirs in zip(one, other, strict=True))
    rows = [json.loads(line) for line in (tmp_path / "a" / "sft.jsonl").read_text().splitlines()]
    assert [message["role"] for message in rows[0]["messages"]] == ["user", "assistant"]


def test_wrong_sizes_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(DataError, match="train = 0: at least 1 row is needed"):
        generate_text(Sizes(train=0), seed=1)
    assert main(["-o", str(tmp_path), "--test", str(PAIRS)]) == 2
    assert f"test = {PAIRS}: legal: 1 to {PAIRS // 4}" in capsys.readouterr().err
    assert main(["-o", str(tmp_path), "--documents", "10"]) == 0
    assert len((tmp_path / "corpus.jsonl").read_text().splitlines()) == 10
