"""`gspo-megatron new`, and the use of its folder as the command's output describes it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from gspo_megatron.config import load_config
from gspo_megatron.data.character_tokenizer import CHATML_SYMBOLS, write_character_tokenizer
from tests.programs import gspo, run_program
from tests.unit.hf.published import write_model

VOCABULARY = 320


@pytest.fixture(scope="module")
def hf_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3-MoE with 512 positions, and a tokenizer with a chat template."""
    sizes = {"max_position_embeddings": 512, "vocab_size": VOCABULARY}
    folder = write_model(tmp_path_factory.mktemp("hf") / "model", "qwen3_moe", seed=3, **sizes)
    texts = ["What is 3 + 4? 1 2 5 6 7 8 9 0 ="]
    write_character_tokenizer(folder, texts, VOCABULARY, **CHATML_SYMBOLS)
    return folder


def new(tmp_path: Path, *words: object) -> tuple[Path, str]:
    """Run `gspo-megatron new`. Returns the new folder, and the output."""
    return tmp_path / "my run", gspo("new", tmp_path / "my run", *words).stdout


def printed_command(text: str) -> list[str]:
    """The command that `new` prints for this machine, as words for bash, with two steps."""
    [command] = re.findall(r"on this machine: +(.+)", text)
    return ["bash", "-euc", f"{command} training.steps=2 rollout.max_response_tokens=8"]


def test_without_a_model_the_printed_command_trains(tmp_path: Path) -> None:
    folder, printed = new(tmp_path)
    run_program(*printed_command(printed), cwd="/")
    steps = (folder / "run/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in steps][-1] == 2
    assert "reward/mean" in json.loads(steps[-1])
    assert not list(tmp_path.glob(".*"))  # no staging folder is left


def test_with_a_model_of_hugging_face_the_printed_command_trains_it(
    tmp_path: Path, hf_folder: Path
) -> None:
    folder, printed = new(tmp_path, "--model", hf_folder)
    config = load_config(folder / "config.yaml")
    assert config.model.hf_path == config.data.tokenizer == str(hf_folder)
    assert config.rollout.max_response_tokens == 256
    run_program(*printed_command(printed), cwd="/")
    sample = json.loads((folder / "run/samples.jsonl").read_text().splitlines()[0])
    assert sample["prompt"].endswith(" = ?")
    assert (folder / "run/checkpoints/rl_00000002").is_dir()
