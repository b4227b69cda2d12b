"""Fixtures for several files of tests: stand-ins for servers, and configurations of runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from gspo_megatron.config import Config
from gspo_megatron.config.load import load_config
from gspo_megatron.data.toy import write_toy_dataset
from tests.unit.rollout.double import Double

REWARD = "def reward(sample):\n    return {value}\n"


@pytest.fixture(params=[False, True], ids=["json", "parts"])
def gives_parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the servers that stand in for vLLM have this package's middleware."""
    monkeypatch.setattr(Double, "gives_parts", request.param)
    return request.param


@pytest.fixture
def configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Config]:
    """A function that makes the configuration of a run with a custom reward and overrides."""
    monkeypatch.chdir(tmp_path)
    # The reward's folder will be added to the path. This call restores the path after the test.
    monkeypatch.setattr(sys, "path", [*sys.path])
    write_toy_dataset(tmp_path / "toy", "mixed", train=16, test=2, seed=1)
    (tmp_path / "bank_test_reward.py").write_text(REWARD.format(value=0.25))
    content = {
        "data": {"tokenizer": "toy/tokenizer.model", "prompts": "toy/train.jsonl"},
        "rollout": {"engine": "vllm", "vllm": {"servers": 1}},
        "reward": {"import_path": "bank_test_reward:reward"},
        "logging": {"dir": "run"},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(content))
    return lambda *overrides: load_config(tmp_path / "config.yaml", overrides)
