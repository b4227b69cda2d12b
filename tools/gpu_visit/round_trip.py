"""Convert a run's checkpoint to a Hugging Face folder, back to a checkpoint, and to a second
folder. Both folders must have the same tensors: `round_trip.py RUN OUT`."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path


def tensors_of(folder: Path) -> dict[str, object]:
    """Return all tensors of a Hugging Face folder, by name."""
    from safetensors.torch import load_file

    found: dict[str, object] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def main(run: Path, out: Path) -> None:
    """Do the round trip. Exits with a message if a tensor differs."""
    import torch

    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    first, middle, second = out / "first", out / "checkpoint", out / "second"
    for direction, source, destination in (
        ("megatron-to-hf", run, first),
        ("hf-to-megatron", first, middle),
        ("megatron-to-hf", middle, second),
    ):
        command = [sys.executable, "-m", "gspo_megatron", "convert", direction]
        subprocess.run([*command, str(source), str(destination)], check=True)
    before, after = tensors_of(first), tensors_of(second)
    different = sorted(before.keys() ^ after.keys())
    shared = before.keys() & after.keys()
    different += sorted(n for n in shared if not torch.equal(before[n], after[n]))
    if different or not before:
        sys.exit(f"tensors differ after the round trip: {', '.join(different) or 'there are none'}")
    print(f"tensors={len(before)} equal=1")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
