"""Characters that the tokenizer does not know are told, once a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gspo_megatron.config import Config, load_config
from gspo_megatron.data.inputs import read_inputs
from gspo_megatron.data.stage_inputs import read_fine_tuning
from gspo_megatron.data.tokenizers import load_tokenizer, train_sentencepiece
from gspo_megatron.data.unknown import Unknown
from tests.unit.data.corpora import make_tokenizer

TOLD = "texts hold characters that the tokenizer does not know and takes for one and the same"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the letters a to h and nothing else."""
    prefix = tmp_path_factory.mktemp("tokenizer") / "letters"
    return train_sentencepiece(["abcdefgh", "hgfedcba"], 64, prefix, "char")


def write_rows(path: Path, rows: list[object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def pairs(*texts: str) -> list[object]:
    return [{"prompt": text.partition("|")[0], "answer": text.partition("|")[2]} for text in texts]


def load(tmp_path: Path, schema: type, *overrides: str) -> Config:
    (tmp_path / "config.yaml").write_text("{}\n")
    return load_config(tmp_path / "config.yaml", overrides, schema)


def test_prompts_of_reinforcement_learning(tmp_path: Path, tokenizer: Path) -> None:
    train = write_rows(tmp_path / "train.jsonl", pairs("ab|c", "aé日é|x", "b|ü", "日|"))
    test = write_rows(tmp_path / "test.jsonl", pairs("abc|é"))
    words = [f"data.tokenizer={tokenizer}", f"data.prompts={train}", f"data.eval_prompts={test}"]
    (line,) = read_inputs(load(tmp_path, Config, *words)).warnings
    assert line == f"data.prompts: 2 of 4 {TOLD}; the first is {train}:2: 'é', '日'"
    train.write_text(json.dumps({"prompt": "ab", "answer": "h"}) + "\n")
    assert read_inputs(load(tmp_path, Config, *words)).warnings == ()


def test_examples_of_fine_tuning(tmp_path: Path, tokenizer: Path) -> None:
    from gspo_megatron.config.stages import FineTuningConfig

    rows = pairs("ab|c", "a" * 90 + "é|b", "a|xyx")
    path = write_rows(tmp_path / "rows.jsonl", rows)
    words = [f"data.tokenizer={tokenizer}", f"data.examples={path}", "data.eval_examples=null"]
    words += ["data.max_tokens=50", "data.too_long=drop", "training.epochs=1"]
    (line,) = read_fine_tuning(load(tmp_path, FineTuningConfig, *words)).warnings
    assert line == f"data.examples: 1 of 2 {TOLD}; the first is {path}:3: 'x', 'y'"


def test_conversations(tmp_path: Path) -> None:
    from gspo_megatron.data.supervised import Format, load_supervised

    messages = [{"role": "user", "content": "ka🙂"}, {"role": "assistant", "content": "lo"}]
    path = write_rows(tmp_path / "rows.jsonl", [{"messages": messages}])
    form = Format(99, messages_field="messages")
    for byte_fallback in (False, True):
        folder = make_tokenizer(tmp_path / f"t{byte_fallback}", byte_fallback=byte_fallback)
        for where in (folder, folder / "tokenizer.model"):
            data = load_supervised(path, load_tokenizer(where), form)
            expected = Unknown() if byte_fallback else Unknown(1, f"{path}:1", "🙂")
            assert data.counts.unknown == expected


def test_many_characters_are_not_all_shown(tokenizer: Path) -> None:
    known, unknown = load_tokenizer(tokenizer), Unknown()
    for text in ("a", "ijklmnopqrstuvw", "z"):
        unknown.note(known, "p.jsonl:7", known.encode(text), text)
    (line,) = unknown.warnings("data.prompts", 1200)
    assert line.startswith(f"data.prompts: 2 of 1,200 {TOLD}; the first is p.jsonl:7: 'i', 'j', ")
    assert line.endswith(", 'r' and 5 more")


def test_a_token_with_another_meaning_is_not_the_unknown_one(tmp_path: Path) -> None:
    folder = make_tokenizer(tmp_path / "t")
    assert load_tokenizer(folder).unk_id == load_tokenizer(folder / "tokenizer.model").unk_id == 0
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["unk_token"] = settings["eos_token"]  # as GPT-2 has it
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert load_tokenizer(folder).unk_id is None
