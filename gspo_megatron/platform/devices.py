"""Chooses the device and the collective backend of this process, and seeds its generators."""

from __future__ import annotations

import os
import random
import resource

import numpy
import torch

from gspo_megatron.errors import UserError
from gspo_megatron.process.ranks import set_for_this_process


def local_rank() -> int:
    """Return this process's number on its node: torchrun's LOCAL_RANK, else Slurm's, else 0."""
    return int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")))


def select_device() -> torch.device:
    """Return the CUDA device of this process, or the CPU if there is none.

    Raises UserError if two ranks of the host would share a device.
    """
    if torch.cuda.is_available():
        # Megatron-Core's sequence parallelism needs kernels to start in the order of their launch.
        # The driver reads this variable when it creates the first context. Servers do without it.
        set_for_this_process("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        device = torch.device("cuda", _own_gpu())
        torch.cuda.set_device(device)
        # cuDNN makes a plan for each new shape, and decoding has a new shape for each token.
        torch.backends.cuda.enable_cudnn_sdp(False)
        return device
    return torch.device("cpu")


def _own_gpu() -> int:
    """Return the number of this rank's GPU among the GPUs that the process sees. It is the local
    rank, or 0 if each task sees only its own GPU, as with srun --gpus-per-task=1."""
    rank, count = local_rank(), torch.cuda.device_count()
    if rank < count:
        return rank
    if count == 1 and os.environ.get("CUDA_VISIBLE_DEVICES"):
        return 0
    raise UserError(
        f"local rank {rank} (LOCAL_RANK, or SLURM_LOCALID): has no GPU of its own, the process "
        f"sees {count} GPU{'s' * (count != 1)}; start at most {count} ranks on this node, or let "
        "CUDA_VISIBLE_DEVICES show every rank all GPUs of the node, or only its own"
    )


def built_for_cuda() -> tuple[int, int] | None:
    """Return the version of CUDA that torch was built for, or None if it was built without CUDA."""
    if torch.version.cuda is None:
        return None
    major, minor, *_ = torch.version.cuda.split(".")
    return int(major), int(minor)


def collective_backend(device: torch.device) -> str:
    """Return the backend of torch.distributed: NCCL between GPUs, gloo between CPUs."""
    return "nccl" if device.type == "cuda" else "gloo"


def set_seeds(seed: int) -> None:
    """Seed all generators of the process, with the same seed on every rank. Random numbers that
    must differ by rank or sample are seeded by (seed, index) instead, so they do not depend on the
    layout."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)  # of the CPU and of all GPUs


def count_values(values: torch.Tensor, size: int) -> torch.Tensor:
    """Count how often each of 0 to size - 1 is in `values` [n]. Returns [size] int64.

    torch.bincount would look for the largest value first, and make the host wait for a GPU."""
    counts = torch.zeros(size, dtype=torch.long, device=values.device)
    return counts.scatter_add_(0, values.long(), counts.new_ones(()).expand(len(values)))


def peak_memory_bytes() -> int:
    """Return the largest device memory of this process so far; on a CPU, its resident memory."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
