"""Random number generators of ranks, saved and resumed."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from gspo_megatron.checkpoint.rng import load_rng, save_rng
from gspo_megatron.config import Config
from tests.parallel.checkpoints import gathered, start


def rng_after_resume(config: Config, folder: Path, other: Path) -> list[str]:
    """What is wrong with numbers drawn after save_rng and again after load_rng."""
    start(config)
    save_rng(folder)
    first = _draw()
    problems = []
    if _draw() == first:
        problems.append("the generators stand still")
    if load_rng(other):
        problems.append("took the state of another layout")
    if not load_rng(folder) or _draw() != first:
        problems.append("other numbers")
    return [problem for found in gathered(problems) for problem in found] + (
        ["ranks draw alike"] if len(set(gathered(first))) == 1 else []
    )


def save_generators(config: Config, folder: Path) -> None:
    start(config)
    save_rng(folder)


def _draw() -> str:
    with get_cuda_rng_tracker().fork():
        tracked = torch.rand(3).tolist()
    with get_cuda_rng_tracker().fork("expert-parallel-rng"):
        experts = torch.rand(3).tolist()
    drawn = [torch.rand(3).tolist(), tracked, experts, np.random.randn(3).tolist()]
    return repr([*drawn, random.gauss(0, 1), random.random()])
