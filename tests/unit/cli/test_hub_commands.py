"""Commands with names of the Hub: the files that they download, and one line of message for each
mistake."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from gspo_megatron.data.character_tokenizer import write_character_tokenizer
from tests.hub import SmallHub, files_of, small_hub, use_hub
from tests.unit.cli.conftest import Command
from tests.unit.hf.published import write_model

BASE = "org/base"


@pytest.fixture(name="server")
def server_fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallHub]:
    source = write_model(tmp_path / "source", "qwen3_moe", seed=4, vocab_size=300)
    write_character_tokenizer(source, ["abc"], 300)
    monkeypatch.chdir(tmp_path)
    with small_hub() as found:
        use_hub(found, tmp_path / "home", monkeypatch)
        found.add(BASE, files_of(source))
        yield found


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
