"""Mistakes that a conversion of files refuses, and faults that it notices."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gspo_megatron.checkpoint import convert
from gspo_megatron.checkpoint.convert import hf_to_megatron, megatron_to_hf
from gspo_megatron.checkpoint.convert_source import open_checkpoint
from gspo_megatron.checkpoint.folder import hide
from gspo_megatron.checkpoint.manifest import dump_manifest, files_below, record_of
from gspo_megatron.checkpoint.run_state import STATE_FILE, TOKENIZER, RunState, describe_model
from gspo_megatron.config import parse_config
from gspo_megatron.errors import ConfigError, DataError
from gspo_megatron.files import fingerprint
from tests.unit.hf.published import (
    assert_same_bits,
    model_config,
    random_tensors,
    read_folder,
    write_folder,
    write_model,
)


def lines_of(action: Callable[[], object]) -> list[str]:
    with pytest.raises(DataError) as caught:
        action()
    return str(caught.value).splitlines()


def test_tied_copies_must_be_the_same(tmp_path: Path) -> None:
    config = model_config("qwen3", tie_word_embeddings=True)
    tensors = random_tensors(config, seed=13)
    copy = tensors["model.embed_tokens.weight"].clone()
    source = write_folder(tmp_path / "hf", config, tensors | {"lm_head.weight": copy})
    hf_to_megatron(source, tmp_path / "ours")
    megatron_to_hf(tmp_path / "ours", tmp_path / "back")
    assert_same_bits(read_folder(tmp_path / "back"), tensors)  # lm_head.weight is left out
    other = write_folder(tmp_path / "other", config, tensors | {"lm_head.weight": copy + 1})
    (line,) = lines_of(lambda: hf_to_megatron(other, tmp_path / "no"))
    assert "tie_word_embeddings, and lm_head.weight differs from model.embed_tokens.weight" in line


def write_tokenizer(folder: Path, size: int) -> None:
    from tokenizers import Tokenizer, models

    vocabulary = {f"t{number}": number for number in range(size)}
    Tokenizer(models.WordLevel(vocabulary, unk_token="t0")).save(str(folder / "tokenizer.json"))


def test_a_tokenizer_with_more_tokens_than_the_vocabulary(tmp_path: Path) -> None:
    source = write_model(tmp_path / "hf", "qwen3_moe", seed=14)
    for size, added, text in (
        (38, "{}", "tokenizer.json: has token ids up to 37, the model's vocabulary has 37 tokens"),
        (37, '{"<a>": 3, "<b>": 99}', "added_tokens.json: has token ids up to 99"),
        (37, "[", "added_tokens.json: cannot be read"),
    ):
        write_tokenizer(source, size)
        (source / "added_tokens.json").write_text(added)
        (line,) = lines_of(lambda: hf_to_megatron(source, tmp_path / "no"))
        assert text in line


def test_the_tokenizer_comes_along(tmp_path: Path) -> None:
    source = write_model(tmp_path / "hf", "qwen3_moe", seed=15)
    write_tokenizer(source, 30)
    (source / "modeling_own.py").write_text("")
    hf_to_megatron(source, tmp_path / "ours")
    megatron_to_hf(tmp_path / "ours", tmp_path / "back")
    written = (tmp_path / "back/tokenizer.json").read_bytes()
    assert written == (source / "tokenizer.json").read_bytes()
    assert not (tmp_path / "back/modeling_own.py").exists()


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("converted")
    hf_to_megatron(write_model(folder / "hf", "qwen3_moe", seed=16), folder / "ours")
    return folder / "ours"


@pytest.fixture
def ours(converted: Path, tmp_path: Path) -> Path:
    return shutil.copytree(converted, tmp_path / "ours")


def change_model(checkpoint: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change model.json, and the manifest to match."""
    document = json.loads((checkpoint / "model.json").read_text())
    change(document)
    (checkpoint / "model.json").write_text(json.dumps(document))
    sign(checkpoint)


def sign(checkpoint: Path) -> None:
    files = {name: record_of(checkpoint / name) for name in files_below(checkpoint)}
    (checkpoint / "manifest.json").write_bytes(dump_manifest(files))


def make_trained(checkpoint: Path, tokenizer: Path) -> None:
    """Make the checkpoint of a run that started from a Hugging Face model and had this
    tokenizer."""
    shutil.rmtree(checkpoint / "hf")
    change_model(checkpoint, lambda document: document.update(tokenizer=str(tokenizer)))


def test_the_export_of_a_run_says_where_its_answers_end(ours: Path, tmp_path: Path) -> None:
    """The export of a run has the end-of-sequence tokens of the run's tokenizer, wherever its
    weights came from. The export of a folder that was only converted has no
    generation_config.json."""
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    write_tokenizer(tokenizer, 37)
    (tokenizer / "tokenizer_config.json").write_text('{"eos_token": "t5"}')
    as_it_is = shutil.copytree(ours, tmp_path / "as_it_is")
    make_trained(ours, tokenizer)
    megatron_to_hf(ours, tmp_path / "back")
    file = tmp_path / "back/generation_config.json"
    assert json.loads(file.read_text()) == {"eos_token_id": 5}
    (tokenizer / file.name).write_text('{"eos_token_id": [5, 7], "top_k": 3}')
    megatron_to_hf(ours, tmp_path / "again")
    assert json.loads((tmp_path / "again" / file.name).read_text())["top_k"] == 3
    (tokenizer / file.name).unlink()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, as_it_is / "hf")
    sign(as_it_is)
    megatron_to_hf(as_it_is, tmp_path / "same")
    assert (tmp_path / "same/tokenizer_config.json").exists()
    assert not (tmp_path / "same" / file.name).exists()


def test_a_tokenizer_is_found_from_another_folder_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = parse_config({"data": {"tokenizer": "made/t.model", "prompts": "p.jsonl"}}, [])
    assert describe_model(config, 37)["tokenizer"] == str(tmp_path / "made/t.model")


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_tokenizer_with_other_contents_is_not_the_run_s(
    ours: Path, tmp_path: Path, kind: str
) -> None:
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    write_tokenizer(tokenizer, 37)
    named = tokenizer if kind == "folder" else tokenizer / "tokenizer.json"
    make_trained(ours, named)
    state = RunState("rl", 3, {}, {}, {TOKENIZER: fingerprint(named)}, "", 1, {})
    (ours / STATE_FILE).write_bytes(state.dump())
    sign(ours)
    assert megatron_to_hf(ours, tmp_path / "back") == (ours, [])
    assert (tmp_path / "back/tokenizer.json").exists()
    write_tokenizer(tokenizer, 36)
    _, (note,) = megatron_to_hf(ours, tmp_path / "other")
    assert note.startswith(f"{named}: its contents have changed since the run, so it is left out")
    assert not (tmp_path / "other/tokenizer.json").exists()
    shutil.rmtree(tokenizer)
    _, (note,) = megatron_to_hf(ours, tmp_path / "without")
    assert note.startswith(f"{named}: the run's tokenizer is missing, so it is left out")
    assert not (tmp_path / "without/tokenizer.json").exists()


def test_a_checkpoint_of_somebody_else_publishes_no_file_of_the_user(
    ours: Path, tmp_path: Path
) -> None:
    secret = tmp_path / "environ"
    secret.write_text("HF_TOKEN=hf_secret")
    make_trained(ours, secret)
    sign(ours)
    _, (note,) = megatron_to_hf(ours, tmp_path / "back")
    assert note.startswith(f"{secret}: not a sentencepiece model") and "is left out" in note
    assert not (tmp_path / "back/environ").exists()


def test_a_link_in_a_folder_of_somebody_else_publishes_no_file_of_the_user(
    ours: Path, tmp_path: Path
) -> None:
    secret, tokenizer = tmp_path / "id_rsa", tmp_path / "tokenizer"
    secret.write_text("private")
    tokenizer.mkdir()
    write_tokenizer(tokenizer, 37)
    (tokenizer / "vocab.txt").symlink_to(secret)
    make_trained(ours, tokenizer)
    sign(ours)
    with pytest.raises(DataError, match="vocab.txt: a link to .*id_rsa; replace it by a copy"):
        megatron_to_hf(ours, tmp_path / "back")
    (tokenizer / "vocab.txt").unlink()
    (tmp_path / "vocab.txt").write_text("a")
    (tokenizer / "vocab.txt").symlink_to(tmp_path / "vocab.txt")
    megatron_to_hf(ours, tmp_path / "back")
    assert (tmp_path / "back/vocab.txt").read_text() == "a"


def flip(file: Path, place: float = 0.5) -> None:
    data = bytearray(file.read_bytes())
    data[int(place * (len(data) - 1))] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("name", "damage", "expected"),
    [
        ("model/__0_0.distcp", flip, "altered, its checksum differs from the manifest's"),
        ("model/__0_0.distcp", lambda f: flip(f, 1.0), "altered"),  # bytes that no tensor covers
        ("model/.metadata", lambda f: os.truncate(f, 50), "cut short"),
        ("model.json", flip, "altered"),
        ("model/__5_0.distcp", lambda f: f.write_text("x"), "foreign"),
    ],
)
def test_a_damaged_checkpoint_is_refused(
    ours: Path, tmp_path: Path, name: str, damage: Callable[[Path], object], expected: str
) -> None:
    damage(ours / name)
    (line,) = lines_of(lambda: megatron_to_hf(ours, tmp_path / "back"))
    assert line.startswith(f"{ours}: {name}: {expected}")
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]


def test_a_checkpoint_that_its_run_removes_meanwhile(
    ours: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = convert.checked_tensors

    def removed(*arguments: Any) -> Any:
        stored = check(*arguments)
        hide(ours)
        return stored

    monkeypatch.setattr(convert, "checked_tensors", removed)
    lines = lines_of(lambda: megatron_to_hf(ours, tmp_path / "back"))
    assert f"{ours}: manifest.json: missing" in lines
    assert not (tmp_path / "back").exists()


def test_the_newest_whole_checkpoint_of_a_run(converted: Path, tmp_path: Path) -> None:
    for name in ("warm_start_00000009", "rl_00000002", "rl_00000010", "rl_00000011"):
        shutil.copytree(converted, tmp_path / "run/checkpoints" / name)
    os.truncate(tmp_path / "run/checkpoints/rl_00000011/model/__0_0.distcp", 9)
    for path in (tmp_path / "run", tmp_path / "run/checkpoints"):
        assert open_checkpoint(path).folder == tmp_path / "run/checkpoints/rl_00000010"
    (tmp_path / "empty").mkdir()
    (line,) = lines_of(lambda: open_checkpoint(tmp_path / "empty"))
    assert "no checkpoint of gspo-megatron, and there is no whole one in it" in line
    assert lines_of(lambda: open_checkpoint(tmp_path / "none")) == [
        f"{tmp_path / 'none'}: no such folder"
    ]


def test_a_model_that_no_family_has(ours: Path, tmp_path: Path) -> None:
    def change(document: dict[str, Any]) -> None:
        document["hf"] = None
        document["shape"]["megatron"]["normalization"] = "LayerNorm"

    change_model(ours, change)
    with pytest.raises(ConfigError, match="no Hugging Face family has such models"):
        megatron_to_hf(ours, tmp_path / "back")


@pytest.mark.parametrize(
    ("key", "value"),
    [("vocab_size", float("inf")), ("hf", True), ("shape", []), ("num_layers", None),
     ("num_query_groups", 0), ("rotary_percent", float("nan"))],
)  # fmt: skip
def test_a_model_json_of_no_model(ours: Path, tmp_path: Path, key: str, value: Any) -> None:
    def change(document: dict[str, Any]) -> None:
        if key in document:
            document[key] = value
        else:
            document["hf"] = None
            shape = document["shape"]
            (shape if key in shape else shape["megatron"])[key] = value

    change_model(ours, change)
    (line,) = lines_of(lambda: megatron_to_hf(ours, tmp_path / "back"))
    assert line.startswith(f"{ours}/model.json: does not describe a model: ")


def test_tensors_that_are_not_those_of_the_model(ours: Path, tmp_path: Path) -> None:
    def change(document: dict[str, Any]) -> None:
        document["shape"]["num_layers"] = 5
        document["shape"]["megatron"] |= {"num_layers": 5, "moe_layer_freq": [1, 0, 1, 1, 0]}
        document["hf"] |= {"num_hidden_layers": 5, "mlp_only_layers": [1, 4], "vocab_size": 40}
        document["vocab_size"] = 40

    change_model(ours, change)
    lines = lines_of(lambda: megatron_to_hf(ours, tmp_path / "back"))
    assert sum("decoder.layers.4." in line and "is missing" in line for line in lines) == 8
    assert sum("has the shape [37, 44]; model.json says [40, 44]" in line for line in lines) == 2
    assert len(lines) == 10
