"""Commands as a user with GPUs runs them, in processes of their own. Each rank finds its own
device."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from gspo_megatron.checkpoint.convert import megatron_to_hf
from gspo_megatron.data.toy import write_toy_dataset
from tests.cuda_rehearsal import runtime
from tests.cuda_rehearsal.environment import rehearsal
from tests.e2e.conftest import write_config
from tests.programs import ROOT, gspo, run_program


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors in all files of a Hugging Face folder."""
    found: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found


@pytest.mark.timeout(600)
def test_train_resume_evaluate_convert_and_verify(tmp_path: Path) -> None:
    toy = tmp_path / "toy"
    toy.mkdir()
    write_toy_dataset(toy, "mixed", train=64, test=8, seed=1)
    config, run, environ = write_config(toy, tmp_path), tmp_path / "run", rehearsal()
    words = ["training.precision=bf16", "checkpoint.interval=1"]
    gspo("train", config, *words, "parallel.layout=tp=2", **environ)
    assert json.loads((run / "environment.json").read_text())["gpu"]["names"] == ["host memory"] * 2
    # The run continues on another layout, from a checkpoint that was written in the background.
    gspo("train", config, *words, "training.steps=3", "parallel.layout=dp=2", **environ)
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps[-3:] == [1, 2, 3]

    gspo("convert", "megatron-to-hf", run, tmp_path / "hf", "--layout", "tp=2", **environ)
    megatron_to_hf(run, tmp_path / "hf2")  # in this process, on the CPU
    from_shards, whole = (tensors_of(tmp_path / name) for name in ("hf", "hf2"))
    assert whole.keys() == from_shards.keys()
    assert all(torch.equal(tensor, from_shards[name]) for name, tensor in whole.items())
    gspo("evaluate", run, "-o", tmp_path / "evaluated", **environ)
    assert (tmp_path / "evaluated" / "metrics.jsonl").stat().st_size
    (waits := tmp_path / "waits").mkdir()
    words = ("--reference", "tp=2", "--reference-on-cpu", "--layouts", "tp=1")
    told = gspo("verify", config, *words, **environ, **{runtime.WAITS: str(waits)}).stdout
    # The reference was computed on CPUs, so its processes waited for no device.
    assert [file.name for file in waits.iterdir()] == ["rank_0.json"]
    errors = [float(text) for text in re.findall(r"error\S*=(\S+)", told.splitlines()[-1])]
    assert errors and max(errors) < 1e-4, told
    assert yaml.safe_load((run / "config.resolved.yaml").read_text())["training"]["steps"] == 3


def test_tests_of_gpus_run() -> None:
    """The tests in tests/gpu need a GPU and are usually skipped. This test runs the short tests
    among them on the rehearsed device."""
    chosen = "routes or not_rounded or fp32-torch_native"
    words = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "", "-k", chosen, "tests/gpu")
    told = run_program(sys.executable, *words, environ=rehearsal(1), cwd=ROOT).stdout
    assert "3 passed" in told, told
