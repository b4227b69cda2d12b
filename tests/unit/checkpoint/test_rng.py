"""The random number generators of one rank."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from safetensors import safe_open

from gspo_megatron.checkpoint.rng import load_rng, save_rng
from gspo_megatron.errors import DataError

pytestmark = pytest.mark.usefixtures("one_rank")


def draw() -> list:
    with get_cuda_rng_tracker().fork():
        tracked = torch.randn(2).tolist()
    numbers = [torch.randn(3).tolist(), tracked, np.random.randn(3).tolist()]
    return [*numbers, random.gauss(0, 1), random.random()]


def test_each_generator_goes_on(tmp_path: Path) -> None:
    random.gauss(0, 1)  # gauss makes numbers in pairs and keeps the second number for the next call
    np.random.randn()
    save_rng(tmp_path)
    expected = draw()
    assert draw() != expected
    assert load_rng(tmp_path)
    assert draw() == expected


def test_states_of_another_kind_of_device_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        save_rng(tmp_path)
    before = torch.get_rng_state()
    torch.randn(3)
    assert not load_rng(tmp_path)
    assert not torch.equal(torch.get_rng_state(), before)


def test_what_is_on_the_disk_is_no_pickle(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        load_rng(tmp_path)
    save_rng(tmp_path)
    with safe_open(tmp_path / "rng" / "rank_00000.safetensors", framework="pt") as file:
        names = set(file.keys())
    assert {"torch", "numpy", "python", "tracker.model-parallel-rng"} <= names


@pytest.mark.parametrize("keep", [0, 5, 200, -1])
def test_truncated(tmp_path: Path, keep: int) -> None:
    save_rng(tmp_path)
    path = tmp_path / "rng" / "rank_00000.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    before = torch.get_rng_state()
    with pytest.raises(DataError, match="rank_00000.safetensors: cannot be read"):
        load_rng(tmp_path)
    assert torch.equal(torch.get_rng_state(), before)
