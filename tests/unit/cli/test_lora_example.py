"""examples/lora: `check` prints what the README of the example says."""

from __future__ import annotations

import re

import pytest

from gspo_megatron.config import check_config, load_config
from tests.programs import ROOT
from tests.unit.cli.conftest import Command

FOLDER = ROOT / "examples" / "lora"
PRESET = "model.preset=qwen3-30b-a3b"  # in place of the published folder
TEXT = (FOLDER / "README.md").read_text(encoding="utf-8")


def test_six_of_eight_gpus_train_and_two_serve() -> None:
    config = load_config(FOLDER / "config.yaml", [PRESET, "model.hf_path=null"])
    check_config(config, 6)
    servers = config.rollout.vllm
    assert servers.servers * servers.tensor_parallel_size == 8 - 6
    assert config.optimizer.learning_rate == 1e-5 and config.model.lora.rank == 16


@pytest.mark.full
def test_the_estimates_are_those_of_check(gspo: Command) -> None:
    words = ("--world-size", 6, "--gpu-memory", 80, "--no-files", PRESET)
    code, out, _ = gspo("check", FOLDER / "config.yaml", *words)
    assert code == 0 and "training all weights" not in out
    found = {name: float(size) / 1e9 for name, size in re.findall(r"(\w+)_bytes=(\d+)", out)}
    told = [float(size) for size in re.findall(r"^\| .* \| ([0-9.]+) \|$", TEXT, re.MULTILINE)]
    names = ("weights", "gradients", "optimizer", "worst_rank")
    assert told == [round(found[name], 1) for name in names]
    [count] = re.findall(r"adapters +([0-9,]+) parameters", out)
    assert f"The adapters have {count} parameters" in " ".join(TEXT.split())
