"""A reward model in `check` and `score`: its folder, its tokenizer and its memory."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from gspo_megatron.data.character_tokenizer import write_character_tokenizer
from gspo_megatron.data.tokenizers import load_tokenizer
from gspo_megatron.rollout.asking import PROBE
from tests.unit.cli.conftest import Command, ConfigWriter, refused
from tests.unit.hf.preference_folder import write_score_model
from tests.unit.rollout.reward_server import right, score_of, served

VOCABULARY = 64


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = write_score_model(tmp_path / "scorer", "qwen3_moe", 1, vocab_size=VOCABULARY)
    write_character_tokenizer(path, ["0123 abcdefgh"], VOCABULARY, byte_fallback=False)
    return path


def test_its_weights_are_in_the_memory_of_each_rank(
    write_config: ConfigWriter, folder: Path, gspo: Command
) -> None:
    words = ("check", write_config(), "--memory", "parallel.layout=tp=2,pp=2,ep=2")
    code, out, err = gspo(*words, f"reward.model.folder={folder}")
    assert code == 0, err
    with_model = dict(re.findall(r"(\w+)=(\d+)", out.splitlines()[-1]))
    assert "\n reward model " in out
    assert f"\nscores     {folder} on the training ranks, not normalised\n" in out
    _, out, _ = gspo(*words)
    without = dict(re.findall(r"(\w+)=(\d+)", out.splitlines()[-1]))
    assert "\n reward model " not in out and without["scorer_bytes"] == "0"
    held = int(with_model["scorer_bytes"])
    assert int(with_model["worst_rank_bytes"]) == int(without["worst_rank_bytes"]) + held
    # A rank holds about a quarter of the weights in bf16, because the layout has two stages with
    # two shards each.
    weights = sum(each.numel() for each in load_file(folder / "model.safetensors").values())
    assert 0.2 * 2 * weights < held < 0.4 * 2 * weights


def test_what_is_wrong_with_its_folder_is_told_in_one_line(
    write_config: ConfigWriter, folder: Path, tmp_path: Path, gspo: Command
) -> None:
    def told(*words: str) -> str:
        [line] = refused(gspo, "check", write_config(), f"reward.model.folder={folder}", *words)
        return line

    larger = tmp_path / "larger"
    larger.mkdir()
    letters = "".join(map(chr, range(33, 127)))
    write_character_tokenizer(larger, [letters], 2 * VOCABULARY, byte_fallback=False)
    line = told(f"reward.model.tokenizer={larger}")
    assert line.startswith(f"reward.model.tokenizer = {larger}: its tokenizer has ")
    assert line.endswith(f"{folder} has {VOCABULARY}; give the model's own tokenizer")
    line = told(f"reward.model.tokenizer={tmp_path / 'none'}")
    assert line.startswith(f"reward.model.tokenizer = {tmp_path / 'none'}: ")
    (folder / "chat_template.jinja").write_text("{% if %}")
    assert "its chat template is not valid Jinja" in told()
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}<|strange|>")
    assert "writes <|strange|>, which the tokenizer does not have as one token" in told()
    (folder / "chat_template.jinja").unlink()
    weights = folder / "model.safetensors"
    tensors = load_file(weights)
    save_file({k: v for k, v in tensors.items() if k != "score.weight"}, weights)
    assert "score.weight is missing" in told()
    for file in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model"):
        (folder / file).unlink(missing_ok=True)
    line = told()
    assert line.startswith(f"reward.model.folder = {folder}: ")
    assert line.endswith("; reward.model.tokenizer can name another tokenizer")


def test_the_reward_model_of_a_later_phase_is_checked_too(
    write_config: ConfigWriter, folder: Path, gspo: Command
) -> None:
    for file in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model"):
        (folder / file).unlink(missing_ok=True)
    later = f"{{reward: {{model: {{folder: {folder}}}}}}}"
    phases = f"training.phases=[{{until_step: 1}}, {later}]"
    words = ("check", write_config(), "checkpoint.interval=1", phases)
    [line] = refused(gspo, *words)
    assert line.startswith(f"training.phases[1]: reward.model.folder = {folder}: ")
    [line] = refused(gspo, *words, f"reward.model.folder={folder}")
    assert line.startswith(f"reward.model.folder = {folder}: ")


def test_score_asks_a_url_and_says_that_a_folder_needs_the_ranks(
    write_config: ConfigWriter, folder: Path, gspo: Command
) -> None:
    path, tokenizer = write_config(("abc",)), load_tokenizer(folder)
    words = ("score", path, "--response", "1", "reward.weights={model: 2.0}")
    code, out, err = gspo(*words, f"reward.model.folder={folder}")
    assert code == 2 and out == ""
    assert err.startswith(f"reward.model.folder = {folder}: only the training ranks compute")
    with served(right, tokenizer.encode(PROBE)) as url:
        model = (f"reward.model.url={url}", f"reward.model.tokenizer={folder}")
        code, out, err = gspo(*words, *model)
    assert code == 0, err
    lines = dict(line.split(maxsplit=1) for line in out.splitlines() if "part" not in line)
    [prompt] = re.findall(r'"(.*)"', lines["prompt"])
    value = score_of([*tokenizer.encode(f"{prompt}1"), tokenizer.eos_id])
    assert f"part     model {value:g}" in out and "part     exact_match 0" in out
    assert lines["reward"].startswith(f"{2 * value:g} (")
