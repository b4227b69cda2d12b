"""A folder of the wrong kind is refused with one line, which names the right key or command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gspo_megatron.checkpoint.folder import Position
from gspo_megatron.config.load import load_any_config
from tests.unit.checkpoint.test_resume_start import add
from tests.unit.cli.conftest import Command
from tests.unit.hf.published import write_model

VOCAB = 48
CHECKPOINT = "run/checkpoints/rl_00000002"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> Path:
    """A folder with config.yaml, Hugging Face models (some not supported or damaged), and runs, one
    of which is complete. No test changes it."""
    folder = tmp_path_factory.mktemp("folders")
    (folder / "prompts.jsonl").write_text('{"prompt": "abc", "answer": "cba"}\n')
    path = folder / "config.yaml"
    path.write_text(f"data: {{tokenizer: {tokenizer}, prompts: {folder}/prompts.jsonl}}\n")
    write_model(folder / "hf", "qwen3_moe", seed=1, vocab_size=VOCAB)
    write_model(folder / "small", "qwen3_moe", seed=1, vocab_size=5)
    (folder / "llama").mkdir()
    llama = {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3"}
    (folder / "llama" / "config.json").write_text(json.dumps(llama))
    size = f"model.vocab_size={VOCAB}"
    for name, words in (
        ("run", [size]),
        ("damaged", [size]),
        ("cut", [size]),
        ("of_small", [f"model.hf_path={folder}/small"]),
    ):
        made = load_any_config(path, [f"logging.dir={folder / name}", *words])
        for step in (1, 2):
            whole = add(made, Position("rl", step))
            if name == "damaged":
                (whole / "manifest.json").unlink()
            elif name == "cut":
                (whole / "model" / "__0_0.distcp").write_bytes(b"")
        if name == "of_small":  # `add` has written a vocab_size of 48
            document = json.loads((whole / "model.json").read_text())
            (whole / "model.json").write_text(json.dumps(document | {"vocab_size": 5}))
    (folder / "empty").mkdir()
    return folder


@pytest.fixture
def config(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(folder)
    return folder / "config.yaml"


WRONG = {
    "model.hf_path=run": "model.hf_path = 'run': is a checkpoint of gspo-megatron; use "
    "model.checkpoint_path for it",
    f"model.hf_path={CHECKPOINT}": f"model.hf_path = '{CHECKPOINT}': is a checkpoint of "
    "gspo-megatron; use model.checkpoint_path for it",
    "model.hf_path=hf/config.json": "model.hf_path = 'hf/config.json': is a file; allowed: its "
    "folder",
    "model.hf_path=llama": "model.hf_path: llama/config.json: architectures = "
    "['Gemma3ForCausalLM']: not supported; supported: Qwen3MoeForCausalLM",
    "model.checkpoint_path=hf": "model.checkpoint_path = 'hf': is a Hugging Face folder; use "
    "model.hf_path for it",
    "model.checkpoint_path=empty": "model.checkpoint_path = 'empty': holds no checkpoint of "
    "gspo-megatron",
    f"model.checkpoint_path={CHECKPOINT}/model.json": f"model.checkpoint_path = '{CHECKPOINT}/"
    "model.json': is a file; allowed: its folder",
    "model.checkpoint_path=damaged": "model.checkpoint_path = 'damaged': all checkpoints in it are "
    "damaged: none has a manifest.json; allowed: a whole one",
    "model.checkpoint_path=cut": "cut/checkpoints/rl_00000002: model/__0_0.distcp: cut short, ",
    f"model.checkpoint_path=run model.vocab_size={VOCAB} model.megatron.layernorm_epsilon=1e-3": (
        f"model.megatron.layernorm_epsilon = 0.001: {CHECKPOINT} has 1e-06"
    ),
    f"model.checkpoint_path=run model.vocab_size={VOCAB} model.rotary_base=5.0": (
        f"model.rotary_base = 5.0: {CHECKPOINT} has 10000.0"
    ),
    "model.hf_path=hf logging.dir=hf": "logging.dir = 'hf': lies in model.hf_path = hf; allowed: a "
    "folder outside of it",
    "model.hf_path=hf logging.dir=hf/../hf/run": "logging.dir = 'hf/../hf/run': lies in "
    "model.hf_path = hf; allowed: a folder outside of it",
    f"model.checkpoint_path={CHECKPOINT} logging.dir={CHECKPOINT}/new": f"logging.dir = "
    f"'{CHECKPOINT}/new': lies in model.checkpoint_path = {CHECKPOINT}; allowed: ",
    "model.checkpoint_path=of_small": "ids, the model in model.checkpoint_path = of_small 5; "
    "allowed: at most 5",
    "data.tokenizer=empty": "empty: a folder without tokenizer.json or tokenizer_config.json; give",
    "data.tokenizer=run": "run: a folder without tokenizer.json or tokenizer_config.json; give",
}


@pytest.mark.parametrize("words", WRONG)
def test_in_one_line(config: Path, gspo: Command, words: str) -> None:
    code, out, err = gspo("train", config, *words.split())
    (line,) = err.splitlines()
    assert (code, out) == (2, "")
    assert WRONG[words] in line


@pytest.mark.parametrize(
    ("direction", "source", "line"),
    [
        ("hf-to-megatron", "run", "is a checkpoint of gspo-megatron; convert it with `gspo-megatr"),
        ("hf-to-megatron", "hf/config.json", "is a file; allowed: its folder"),
        ("megatron-to-hf", "hf", "is a Hugging Face folder; convert it with `gspo-megatron conver"),
        ("megatron-to-hf", "hf/config.json", "is a file; allowed: its folder"),
    ],
)
def test_convert_names_the_other_direction(
    config: Path, gspo: Command, direction: str, source: str, line: str
) -> None:
    code, _, err = gspo("convert", direction, source, "new")
    assert code == 2 and err.startswith(f"{source}: {line}") and err.count("\n") == 1
    assert not Path("new").exists()


def test_vllm_is_looked_for_before_a_checkpoint_is_converted(gspo: Command, tmp_path: Path) -> None:
    """The missing vLLM is reported first, because converting a large model takes minutes. In this
    test there is not even a model to convert."""
    code, _, err = gspo("serve", tmp_path, "--python", tmp_path / "python")
    assert code == 2 and err.startswith(f"--python {tmp_path / 'python'}: ")
    code, _, err = gspo("serve", tmp_path / "none", "--python", tmp_path / "python")
    assert code == 2 and err == f"{tmp_path / 'none'}: no such folder\n"
