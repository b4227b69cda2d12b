"""The input files of a small run."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest

from gspo_megatron.cli.main import main
from gspo_megatron.data.tokenizers import train_sentencepiece

ConfigWriter = Callable[..., Path]
Command = Callable[..., tuple[object, str, str]]


@pytest.fixture(autouse=True)
def _environment_as_before() -> Iterator[None]:
    """Restore the environment after a test. A command sets torchrun's variables from the variables
    of srun."""
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture
def gspo(capsys: pytest.CaptureFixture[str]) -> Command:
    """A function that runs `gspo-megatron` with the given arguments. It returns exit code, stdout
    and stderr."""

    def run(*words: object) -> tuple[object, str, str]:
        capsys.readouterr()
        try:
            code: object = main([str(word) for word in words])
        except SystemExit as ended:
            code = ended.code
        return code, *capsys.readouterr()

    return run


def refused(gspo: Command, *words: object) -> list[str]:
    """Run a command that must end with exit code 2, and return the lines of its message."""
    code, _, err = gspo(*words)
    assert code == 2
    return err.splitlines()


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A character-level tokenizer of the letters a to h."""
    prefix = tmp_path_factory.mktemp("tokenizer") / "letters"
    return train_sentencepiece(["abcdefgh", "hgfedcba"], 64, prefix, "char")


@pytest.fixture
def write_config(tmp_path: Path, tokenizer: Path) -> ConfigWriter:
    """A function that writes config.yaml and the file of prompts that it names. The function
    returns the path of config.yaml."""

    def write(prompts: tuple[str, ...] = ("abc", "hgfed")) -> Path:
        rows = [json.dumps({"prompt": text, "answer": text[::-1]}) for text in prompts]
        (tmp_path / "prompts.jsonl").write_text("\n".join(rows) + "\n")
        path = tmp_path / "config.yaml"
        path.write_text(f"data: {{tokenizer: {tokenizer}, prompts: {tmp_path}/prompts.jsonl}}\n")
        return path

    return write
