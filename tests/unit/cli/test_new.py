"""The files that `gspo-megatron new` writes, and the folders that it refuses. tests/e2e/test_new.py
starts runs from such a folder."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
import yaml

from gspo_megatron.cli import new
from gspo_megatron.config.schema import Config
from gspo_megatron.config.section import keys_of
from gspo_megatron.data.character_tokenizer import write_character_tokenizer
from tests.unit.cli.conftest import Command
from tests.unit.hf.published import write_model


def test_every_key_has_the_schemas_words(tmp_path: Path, gspo: Command) -> None:
    folder = tmp_path / "new"
    code, out, _ = gspo("new", folder)
    assert code == 0 and f"bash {folder}/run.sh" in out and "sbatch --nodes=1" in out
    text, meanings = (folder / "config.yaml").read_text(), keys_of(Config)
    comments = " ".join(line.strip(" #") for line in text.splitlines() if "  #" in line)
    for section, keys in yaml.safe_load(text).items():
        for key in keys:
            assert meanings[f"{section}.{key}"].description in comments, f"{section}.{key}"
    rows = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    assert len(rows) == 10 and {row["prompt"][0]["role"] for row in rows} == {"user"}
    assert (folder / "run.sh").stat().st_mode & stat.S_IXUSR


@pytest.mark.parametrize(("positions", "longest", "clip"), [(0, 8, 0.014), (8192, 256, 0.0025)])
def test_the_clip_range_fits_the_length_of_the_responses(
    tmp_path: Path, gspo: Command, positions: int, longest: int, clip: float
) -> None:
    """The paper's range would clip nearly all short responses."""
    words = []
    if positions:
        sizes = {"max_position_embeddings": positions}
        model = write_model(tmp_path / "hf", "qwen3", seed=1, files=1, **sizes)
        write_character_tokenizer(model, ["abc"], 300)
        words = ["--model", model]
    assert gspo("new", tmp_path / "new", *words)[0] == 0
    text = (tmp_path / "new/config.yaml").read_text()
    config = yaml.safe_load(text)
    assert config["rollout"]["max_response_tokens"] == longest
    objective = config["objective"]
    assert objective["clip_low"] == objective["clip_high"] == clip
    assert "1 / sqrt(tokens)" in text and "clip/token/binding" in text


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        ("full", "my run: is not empty; name a new folder"),
        ("file", "my run: is a file; name a new folder"),
        ("config", "config.json: No such file"),
        ("family", "architectures = ['Gemma3ForCausalLM']: not supported; supported: Qwen3Moe"),
        ("weights", "safetensors"),
        ("tokenizer", "without tokenizer.json"),
        ("no folder", "nowhere: no such folder"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_written(
    tmp_path: Path, spoil: str, told: str, gspo: Command
) -> None:
    folder, model = tmp_path / "my run", write_model(tmp_path / "hf", "qwen3", seed=1, files=1)
    write_character_tokenizer(model, ["abc"], 300)
    if spoil == "full":
        folder.mkdir()
        (folder / "kept").touch()
    elif spoil == "file":
        folder.touch()
    elif spoil == "family":
        config = json.loads((model / "config.json").read_text())
        config |= {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3"}
        (model / "config.json").write_text(json.dumps(config))
    elif spoil == "no folder":
        model = tmp_path / "nowhere"
    else:
        for file in {
            "config": ["config.json"],
            "weights": ["model.safetensors"],
            "tokenizer": ["tokenizer.json", "tokenizer_config.json"],
        }[spoil]:
            (model / file).unlink()
    before = sorted(tmp_path.rglob("*"))
    code, _, said = gspo("new", folder, "--model", model)
    assert code == 2 and told in said and len(said.splitlines()) == 1, said
    assert sorted(tmp_path.rglob("*")) == before


def test_all_mistakes_are_told_at_once(tmp_path: Path, gspo: Command) -> None:
    (tmp_path / "file").touch()
    code, _, said = gspo("new", tmp_path, "--model", tmp_path / "nowhere")
    assert code == 2 and "is not empty" in said and "nowhere: no such folder" in said


def test_a_folder_that_cannot_be_finished_never_appears(
    tmp_path: Path, gspo: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_values: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(new, "commented_yaml", full)
    assert gspo("new", tmp_path / "new")[::2] == (
        2,
        f"{tmp_path / 'new'}: cannot be written: No space left on device\n",
    )
    assert list(tmp_path.iterdir()) == []


def test_an_empty_folder_is_taken_but_not_the_current_one(
    tmp_path: Path, gspo: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "is the current folder" in gspo("new", ".")[2]
    (tmp_path / "empty").mkdir()
    assert gspo("new", "empty")[0] == 0 and (tmp_path / "empty/run.sh").is_file()
