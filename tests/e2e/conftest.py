"""A toy data set and a small configuration, for runs of the real command."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from gspo_megatron.data.toy import write_toy_dataset
from tests.programs import command_environment, gspo

__all__ = ["command_environment"]

Command = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with train.jsonl, test.jsonl and tokenizer.model."""
    folder = tmp_path_factory.mktemp("toy")
    write_toy_dataset(folder, "mixed", train=64, test=8, seed=1)
    return folder


@pytest.fixture
def config_file(toy: Path, tmp_path: Path) -> Path:
    """A configuration from `write_config`, in a new folder."""
    return write_config(toy, tmp_path)


def write_config(toy: Path, folder: Path) -> Path:
    """Write the smallest useful configuration: one rank, two steps, and no plots, which would take
    as long as the rest."""
    config = {
        "data": {
            "prompts": str(toy / "train.jsonl"),
            "eval_prompts": str(toy / "test.jsonl"),
            "tokenizer": str(toy / "tokenizer.model"),
        },
        "rollout": {"group_size": 4, "prompts_per_step": 4, "max_response_tokens": 6},
        "reward": {"name": "per_character"},
        "objective": {"name": "gspo", "mini_batches": 2},
        "training": {"steps": 2, "precision": "fp32"},
        "logging": {"dir": str(folder / "run"), "plots": False},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.fixture(scope="session", name="gspo")
def gspo_fixture() -> Command:
    return gspo
