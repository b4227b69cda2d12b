"""Make the student of a distillation: a Hugging Face model with noise on its experts' weights.

    python examples/distillation/spoil.py TEACHER STUDENT --noise 2.0

The noise is Gaussian. For each tensor, its standard deviation is --noise times the standard
deviation of the tensor's elements.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from gspo_megatron.errors import DataError
from gspo_megatron.process.failures import run_script


def spoil(teacher: Path, student: Path, noise: float, seed: int) -> None:
    """Write the student. Raises DataError if its folder exists already, or if the teacher has no
    experts in a file model.safetensors that can be read."""
    if student.exists():
        raise DataError(f"{student}: is there already; give a new folder")
    weights = teacher / "model.safetensors"
    if not weights.is_file():
        raise DataError(f"{weights}: no such file; give the Hugging Face folder of a small model")
    try:
        tensors = load_file(weights)
    except SafetensorError as error:
        raise DataError(f"{weights}: not a safetensors file: {error}") from error
    if not any(".experts." in name for name in tensors):
        raise DataError(f"{weights}: has no experts to add noise to; give a Mixture of Experts")
    generator = torch.Generator().manual_seed(seed)
    for name in sorted(tensors):
        if ".experts." in name:
            tensor = tensors[name].float()
            added = noise * tensor.std() * torch.randn(tensor.shape, generator=generator)
            tensors[name] = (tensor + added).to(tensors[name].dtype)
    shutil.copytree(teacher, student)
    save_file(tensors, student / "model.safetensors", metadata={"format": "pt"})


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("teacher", type=Path, help="the folder to read")
    parser.add_argument("student", type=Path, help="the new folder")
    parser.add_argument("--noise", type=float, default=2.0, help="see above (2.0)")
    parser.add_argument("--seed", type=int, default=1, help="of the noise (1)")
    given = parser.parse_args(arguments)
    spoil(given.teacher, given.student, given.noise, given.seed)
    return 0


if __name__ == "__main__":
    sys.exit(run_script(main))
