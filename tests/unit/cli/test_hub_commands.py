"""Commands with names of the Hub: the files that they download, and one line of message for each
mistake."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml

from gspo_megatron.checkpoint import convert_adapters, convert_workers
from gspo_megatron.checkpoint.convert import hf_to_megatron
from gspo_megatron.checkpoint.run_state import CONFIG_FILE, STATE_FILE, RunState
from gspo_megatron.data.character_tokenizer import write_character_tokenizer
from tests.hub import TOKEN, SmallHub, files_of
from tests.programs import ROOT, run_program
from tests.unit.cli.conftest import Command
from tests.unit.hf.published import write_model

BASE = "org/base"
EXPORT = ("convert", "megatron-to-hf")


@pytest.fixture(name="server")
def server_fixture(server: SmallHub, tmp_path: Path) -> SmallHub:
    source = write_model(tmp_path / "source", "qwen3_moe", seed=4, vocab_size=300)
    write_character_tokenizer(source, ["abc"], 300)
    server.add(BASE, files_of(source))
    return server


def test_check_and_new_leave_the_weights_where_they_are(
    server: SmallHub, gspo: Command, tmp_path: Path
) -> None:
    code, _, said = gspo("new", "my", "--model", BASE)
    assert code == 0, said
    rows = "\n".join(json.dumps({"prompt": text, "answer": text}) for text in ("ab", "ca"))
    server.add("org/rows", {"train.jsonl": rows.encode()}, "dataset")
    words = ("data.prompts=org/rows", "data.eval_prompts=null", "training.evaluation_interval=0")
    code, out, said = gspo("check", "my/config.yaml", *words)
    assert code == 0, said
    assert f"{BASE}@" in out and "3 files of 0.0 GB not downloaded yet" in " ".join(out.split())
    names = {line.rpartition("/")[2] for line in server.downloads()}
    assert "config.json" in names and "train.jsonl" in names
    assert not any(name.endswith(".safetensors") for name in names)
    assert not (tmp_path / "run").exists()  # check writes nothing there


def test_a_conversion_and_an_evaluation_begin_with_a_name(server: SmallHub, gspo: Command) -> None:
    code, out, said = gspo("convert", "hf-to-megatron", f"{BASE}@main", "out")
    assert code == 0 and "out: written from" in out, said
    code, _, said = gspo("evaluate", BASE)
    assert code == 2 and "names nothing to evaluate; allowed: --suite" in said


def save(source: Path, step: int) -> Path:
    """Write a checkpoint of a run with the weights of a Hugging Face folder."""
    folder = source.parent / f"run/checkpoints/rl_{step:08}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    hf_to_megatron(source, folder)
    state = RunState("rl", step, {}, {}, {}, "tp=1", 1, {})
    (folder / STATE_FILE).write_bytes(state.dump())
    (folder / CONFIG_FILE).write_text(yaml.safe_dump({"training": {"steps": 9}}))
    return folder


def card_of(server: SmallHub, name: str) -> str:
    """The model card of the newest commit of a pushed repository."""
    repository = server.repositories[f"models/{name}"]
    return repository.commits[repository.branches["main"]]["README.md"].decode()


def test_the_card_describes_the_checkpoint_that_was_converted(
    server: SmallHub, gspo: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that goes on publishes a newer checkpoint during the conversion."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    save(tmp_path / "source", 1)
    convert = convert_adapters.any_to_hf

    def slow(*given: Any, **more: Any) -> Any:
        result = convert(*given, **more)
        save(tmp_path / "source", 2)
        return result

    monkeypatch.setattr(convert_adapters, "any_to_hf", slow)
    code, out, said = gspo(*EXPORT, "run", "out", "--push", "org/new")
    assert code == 0 and "rl_00000001" in out, said
    assert "1 steps." in card_of(server, "org/new")


def test_a_process_of_torchrun_pushes(
    server: SmallHub, gspo: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    save(tmp_path / "source", 1)
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
    code, out, said = gspo(*EXPORT, "run", "out", "--push", "org/new")
    assert code == 0 and f"{server.url}/org/new/tree/" in out, said
    assert "1 steps." in card_of(server, "org/new")


def test_several_processes_push_once(server: SmallHub, tmp_path: Path) -> None:
    save(tmp_path / "source", 1)
    words = (*EXPORT, "run", "out", "--push", "org/open", "--public", "--layout", "tp=2")
    environ = server.environ(tmp_path / "home", PYTHONPATH=str(ROOT), HF_TOKEN=TOKEN)
    program = (sys.executable, "-m", "gspo_megatron")
    ended = run_program(*program, *words, environ=environ, cwd=tmp_path)
    assert f"{server.url}/org/open/tree/" in ended.stdout
    repository = server.repositories["models/org/open"]
    assert not repository.private and len(repository.commits) == 2  # the first one is empty
    assert "1 steps." in card_of(server, "org/open")


def test_a_rank_tells_that_its_push_has_failed_before_it_leaves(
    server: SmallHub, gspo: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank may abort when it destroys its process group, and an abort hides the error."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    save(tmp_path / "source", 1)
    server.refuse_commits = True
    two = convert_workers.WorkerShard(0, 2, lambda value: [value, value])
    monkeypatch.setattr(convert_workers, "shard_of_rank", lambda: contextlib.nullcontext(two))
    monkeypatch.setattr(os, "_exit", mock.Mock(side_effect=SystemExit))
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    os.environ |= {"RANK": "0", "WORLD_SIZE": "2"} | address
    _, out, said = gspo(*EXPORT, "run", "out", "--push", "org/new")
    assert os._exit.mock_calls == [mock.call(2)], said
    assert "out: written from" in out and "--push org/new: nothing was pushed: " in said


@pytest.mark.parametrize(
    "words",
    [
        ("new", "my", "--model", "org/none"),
        ("evaluate", "org/none", "--suite", "suites.yaml"),
        ("serve", "org/none"),
        ("convert", "hf-to-megatron", "org/none", "out"),
        ("check", "config.yaml"),
        ("train", "config.yaml"),
    ],
)
def test_a_wrong_name_is_one_line(
    server: SmallHub, gspo: Command, tmp_path: Path, words: tuple[str, ...]
) -> None:
    suites = {"one": {"prompts": "org/rows"}}
    (tmp_path / "suites.yaml").write_text(yaml.safe_dump(suites))
    data = {"tokenizer": str(tmp_path / "source"), "prompts": "config.yaml"}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"data": data}))
    more = ("model.hf_path=org/none",) if words[0] in ("check", "train") else ()
    code, _, said = gspo(*words, *more)
    lines = [line for line in said.splitlines() if "org/none" in line]
    assert code == 2 and len(lines) == 1, said
    assert "org/none" in lines[0] and f"no such model at {server.url}" in lines[0]
    assert not (tmp_path / "my").exists() and not (tmp_path / "out").exists()
