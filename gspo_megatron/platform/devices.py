"""Which device and collective backend this process uses, and its random seeds."""

from __future__ import annotations

import os
import random

import numpy
import torch


def local_rank() -> int:
    """This process's number on its node: torchrun's LOCAL_RANK, else Slurm's, else 0."""
    for name in ("LOCAL_RANK", "SLURM_LOCALID"):
        if name in os.environ:
            return int(os.environ[name])
    return 0


def select_device() -> torch.device:
    """The CUDA device of this process, or the CPU where there is none."""
    if torch.cuda.is_available():
        # Megatron-Core's sequence parallelism relies on kernels starting in the order of their
        # launch; the driver reads this when the first context is made.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        device = torch.device("cuda", local_rank() % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")


def built_for_cuda() -> tuple[int, int] | None:
    """The version of CUDA that torch was built for; None: without."""
    if torch.version.cuda is None:
        return None
    major, minor, *_ = torch.version.cuda.split(".")
    return int(major), int(minor)


def collective_backend(device: torch.device) -> str:
    """NCCL between GPUs, gloo between CPUs."""
    return "nccl" if device.type == "cuda" else "gloo"


def set_seeds(seed: int) -> None:
    """Seed every generator of the process alike; what must differ by rank or sample derives its
    randomness from (seed, index) instead, so that it does not depend on the layout."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)
