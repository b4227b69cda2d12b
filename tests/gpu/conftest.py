"""Fixtures that run the tasks of one_step.py in processes, and a check of what this machine's GPU
supports."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gspo_megatron.config.precision import FP8, device_lacks, engine_lacks
from gspo_megatron.platform.devices import built_for_cuda
from tests.programs import ROOT, run_program

Task = Callable[..., Any]


def run_task(task: str, folder: Path, out: Path, *, cpu: bool = False, **options: str) -> None:
    """Run a task. If it fails, raises AssertionError with its output."""
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if cpu else {}
    program = (sys.executable, "-m", "tests.gpu.one_step", task, folder, out, json.dumps(options))
    run_program(*program, environ=hidden, timeout=280, cwd=ROOT)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder with random weights."""
    folder = tmp_path_factory.mktemp("model")
    run_task("make", folder / "hf", folder / "nothing", cpu=True)
    return folder / "hf"


@pytest.fixture(scope="session")
def task(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Task:
    """A function that runs a task on the model and returns its result. Results are cached."""
    folder, known = tmp_path_factory.mktemp("results"), {}

    def run(name: str, precision: str, backend: str = "torch_native", **options: Any) -> Any:
        key = (name, precision, backend, options.get("cpu", False))
        if key not in known:
            out = folder / f"{len(known)}.pt"
            if name == "resume":
                options["checkpoint"] = str(folder / f"{len(known)}")
            run_task(name, model, out, precision=precision, backend=backend, **options)
            known[key] = torch.load(out, weights_only=False)  # this file is our own
        return known[key]

    return run


def need(precision: str, *, engine: bool = False) -> None:
    """Skip the test, and give the reason, if the GPU does not support the precision, or if
    Transformer Engine is needed but missing."""
    capability = torch.cuda.get_device_capability()
    lacks = engine_lacks() if engine or precision in FP8 else None
    if lacks is None and precision in FP8:
        lacks = device_lacks(precision, capability, built_for_cuda())
    if lacks is not None:
        pytest.skip(f"{precision} {lacks}")
