"""Pushing to the Hub with the real client: the files, the model card, and failures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from gspo_megatron.errors import DataError
from gspo_megatron.hf.hub import check_push, push, write_card
from tests.hub import TOKEN, SmallHub, files_of

CONFIG = {
    "model": {"hf_path": "org/base@v1"},
    "data": {
        "prompts": ["org/rows:train@v2", "/home/me/secret/own.jsonl", "runs/b/c.jsonl"],
        "tokenizer": "x",
    },
    "objective": {"name": "gspo", "mini_batches": 2},
    "training": {"steps": 8},
}


@pytest.fixture(name="server")
def server_fixture(server: SmallHub, monkeypatch: pytest.MonkeyPatch) -> SmallHub:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    return server


@pytest.fixture(name="folder")
def folder_fixture(tmp_path: Path) -> Path:
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(10_000))
    return folder


def card_of(folder: Path, config: dict[str, Any], scores: dict[str, Any]) -> tuple[Any, str]:
    text = write_card(folder, "org/new", config, 7, scores).read_text()
    return yaml.safe_load(text.split("---")[1]), text


def test_a_push_is_one_commit_of_all_files(server: SmallHub, folder: Path) -> None:
    address = push(folder, "org/new")
    repository = server.repositories["models/org/new"]
    commit = repository.branches["main"]
    assert repository.private and address == f"{server.url}/org/new/tree/{commit}"
    assert len(repository.commits) == 2 and repository.commits[commit] == files_of(folder)
    push(folder, "org/open", private=False)
    assert not server.repositories["models/org/open"].private


def test_a_push_that_fails_changes_nothing(server: SmallHub, folder: Path) -> None:
    push(folder, "org/new")
    before = dict(server.repositories["models/org/new"].branches)
    server.refuse_commits = True
    (folder / "config.json").write_text('{"new": 1}')
    with pytest.raises(DataError, match="--push org/new: nothing was pushed: ") as raised:
        push(folder, "org/new")
    assert "status 500" in str(raised.value) and TOKEN not in str(raised.value)
    assert server.repositories["models/org/new"].branches == before


def test_what_cannot_be_pushed_is_told_before_the_conversion(
    server: SmallHub, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("new", "a/b/c", "org/new@main", "../new", "org/new\n"):
        with pytest.raises(DataError, match="not a name of the Hub; allowed: ORG/NAME"):
            check_push(name)
    monkeypatch.setenv("HF_TOKEN", "hf_of_somebody_else")
    with pytest.raises(DataError, match="refuses the token in HF_TOKEN") as raised:
        push(folder, "org/new")
    assert "hf_of" not in str(raised.value)
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(DataError, match="no token; set HF_TOKEN"):
        check_push("org/new")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match="HF_HUB_OFFLINE is set"):
        check_push("org/new")
    assert server.repositories == {}


def test_the_card_tells_the_origin_and_no_path(server: SmallHub, folder: Path) -> None:
    commit = server.add("org/base", {"README.md": b""}, card={"license": "mit"})
    server.repositories["models/org/base"].branches["v1"] = commit
    header, text = card_of(folder, CONFIG, {"evaluation/reward/mean": 0.51234, "x": None})
    assert header["base_model"] == "org/base" and header["license"] == "mit"
    assert header["datasets"] == ["org/rows"] and header["library_name"] == "transformers"
    assert "Licence of the base: mit." in text and "7 steps" in text
    assert "| evaluation/reward/mean | 0.5123 |" in text
    assert "| objective.name | gspo |" in text and "| training.steps | 8 |" in text
    assert "- org/rows:train@v2" in text and "- own.jsonl" in text
    assert "- c.jsonl" in text and "runs/b" not in text
    assert "/home" not in text and TOKEN not in text
    (folder / "adapter_config.json").write_text("{}")
    assert card_of(folder, CONFIG, {})[0]["library_name"] == "peft"


def test_a_licence_that_cannot_be_read_is_not_invented(server: SmallHub, folder: Path) -> None:
    """The base may be missing on the Hub, be a folder with or without a model card, or not be given
    at all."""
    header, text = card_of(folder, CONFIG, {})
    assert "license" not in header and "not known here. Look it up" in text
    assert "None was made." in text
    base = folder / "base"
    base.mkdir()
    header, text = card_of(folder, {"model": {"hf_path": str(base)}}, {})
    assert "license" not in header and "base_model" not in header and "Base: base." in text
    (base / "README.md").write_text("---\nlicense: llama3\n---\n")
    assert card_of(folder, {"model": {"hf_path": str(base)}}, {})[0]["license"] == "llama3"
    assert "to be named by whoever publishes this model" in card_of(folder, {}, {})[1]
    assert server.requests != []


def test_a_path_that_is_not_here_is_not_taken_for_a_name(server: SmallHub, folder: Path) -> None:
    """A conversion may run in another folder than the run. A run writes names with commits."""
    data = {"preferences": "corp/pairs", "prompts": ["corp/rows"]}
    config = {"model": {"hf_path": "corp/base"}, "data": data, "preference": {"loss": "regression"}}
    header, text = card_of(folder, config, {})
    assert "base_model" not in header and "datasets" not in header
    assert "Base: base." in text and "- pairs\n" in text and "- rows\n" in text
    assert "corp" not in text and server.requests == []
    assert "| preference.loss | regression |" in text
