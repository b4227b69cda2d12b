from __future__ import annotations

import json
from pathlib import Path

import pytest

from gspo_megatron.checkpoint.hf.export import export_hf
from gspo_megatron.checkpoint.hf.generation import generation_files
from gspo_megatron.data.tokenizer_training import TokenizerRecipe, train_tokenizer
from gspo_megatron.errors import DataError
from tests.unit.checkpoint.hf.policies import config_of, policy_of
from tests.unit.checkpoint.hf.published import write_model

NAME = "generation_config.json"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its folder, in both forms; the ids are those of train_tokenizer: unknown, padding, end."""
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "text.txt").write_text("abc\n" * 20)
    recipe = TokenizerRecipe(vocab_size=12, model_type="char", byte_fallback=False)
    train_tokenizer([folder / "text.txt"], folder / "made", recipe)
    return folder / "made"


@pytest.mark.parametrize("suffixes", [(".model",), (".json",), (".model", ".json")])
def test_either_form_of_a_tokenizer_says_where_an_answer_ends(
    tokenizer: Path, suffixes: tuple[str, ...]
) -> None:
    files = [file for file in tokenizer.iterdir() if file.suffix in suffixes]
    assert generation_files(files) == {NAME: {"eos_token_id": 2, "pad_token_id": 1}}


def test_a_token_may_be_spelled_with_its_settings(tokenizer: Path, tmp_path: Path) -> None:
    settings = {"eos_token": {"content": "</s>", "lstrip": False}, "pad_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "tokenizer.json").write_bytes((tokenizer / "tokenizer.json").read_bytes())
    assert generation_files(sorted(tmp_path.iterdir())) == {NAME: {"eos_token_id": 2}}


def test_nothing_is_made_up(tokenizer: Path, tmp_path: Path) -> None:
    assert generation_files([]) == {}
    for name, text in ((NAME, "{}"), ("tokenizer_config.json", "{}"), ("merges.txt", "")):
        (tmp_path / name).write_text(text)
    theirs = [*tokenizer.iterdir(), tmp_path / NAME]  # which is copied as it is
    assert generation_files(theirs) == {}
    files = [tmp_path / "tokenizer_config.json", tokenizer / "tokenizer.json"]
    assert generation_files(files) == {}  # it names no such token
    assert generation_files([tmp_path / "merges.txt"]) == {}


@pytest.mark.parametrize("name", ["tokenizer.model", "tokenizer.json"])
def test_a_damaged_tokenizer_is_named(tokenizer: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"{ damaged")
    files = [tmp_path / name]
    if name == "tokenizer.json":
        files.append(tokenizer / "tokenizer_config.json")
    with pytest.raises(DataError, match=f"{tmp_path}: no tokenizer that can be read"):
        generation_files(files)


@pytest.mark.usefixtures("one_rank")
def test_a_running_model_that_began_as_somebody_else_s(tokenizer: Path, tmp_path: Path) -> None:
    source = write_model(tmp_path / "hf", "qwen3", seed=18)
    original = json.loads((source / "config.json").read_text())
    policy = policy_of(config_of(source))
    export_hf(policy, tmp_path / "out", hf_config=original, tokenizer=tokenizer)
    made = json.loads((tmp_path / "out" / NAME).read_text())
    assert made == {"eos_token_id": 2, "pad_token_id": 1}
