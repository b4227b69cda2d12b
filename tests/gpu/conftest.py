"""Tasks of one_step.py in processes of their own, and what this machine's GPU can do."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gspo_megatron.config.precision import FP8, device_lacks, engine_lacks
from gspo_megatron.platform.devices import built_for_cuda

ROOT = Path(__file__).resolve().parents[2]
Task = Callable[..., Any]


def run_task(task: str, folder: Path, *, cpu: bool = False, **options: str | Path) -> None:
    """Raises AssertionError with what it said where it fails."""
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if cpu else {}
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.one_step", task, str(folder), *words],
        cwd=ROOT,
        env=os.environ | hidden,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, as a Hugging Face folder."""
    folder = tmp_path_factory.mktemp("model") / "hf"
    run_task("make", folder, cpu=True)
    return folder


@pytest.fixture(scope="session")
def task(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Task:
    """Runs a task on the model and returns its result; the same one once."""
    folder, known = tmp_path_factory.mktemp("results"), {}

    def run(name: str, precision: str, backend: str = "torch_native", **options: Any) -> Any:
        key = (name, precision, backend, options.get("cpu", False))
        if key not in known:
            out = folder / f"{len(known)}.pt"
            if name == "resume":
                options["checkpoint"] = folder / f"{len(known)}"
            run_task(name, model, precision=precision, backend=backend, out=out, **options)
            known[key] = torch.load(out, weights_only=False)  # our own file
        return known[key]

    return run


def need(precision: str) -> None:
    """Skip the test where this machine cannot do it, and say why."""
    if precision not in FP8:
        return
    lacks = engine_lacks() or device_lacks(
        precision, torch.cuda.get_device_capability(), built_for_cuda()
    )
    if lacks is not None:
        pytest.skip(f"{precision} {lacks}")


def need_engine() -> None:
    """Skip the test where there is no Transformer Engine."""
    if engine_lacks() is not None:
        pytest.skip(engine_lacks())
