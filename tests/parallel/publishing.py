"""What ranks do for a checkpoint besides writing their tensors."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from gspo_megatron.checkpoint import tensors
from gspo_megatron.checkpoint import writer as checkpoint_writer
from gspo_megatron.config import Config
from tests.parallel.checkpoints import start


@dataclass
class Published:
    """What a rank did for a checkpoint."""

    problem: str | None
    looks: int  # into its folder
    over_writers: bool  # whether all that ranks told each other went over that group


def publish(config: Config, folder: Path, *, asynchronous: bool) -> list[Published]:
    """A checkpoint of every rank's, by rank; each adds a small file, the later ranks last."""
    policy, trainer = start(config)
    rank, looks, groups = dist.get_rank(), [], []
    native_look, native_write = checkpoint_writer.files_below, tensors.write_pieces

    def files_below(below: Path) -> list[str]:
        looks.append(below)
        return native_look(below)

    def write_pieces(below: Path, pieces: Any, group: Any = None, *rest: Any) -> None:
        groups.append(group)
        native_write(below, pieces, group, *rest)

    def write_small(below: Path) -> None:
        time.sleep(0.2 * rank)
        (below / f"rank_{rank:05d}.txt").write_text("small")

    checkpoint_writer.files_below, tensors.write_pieces = files_below, write_pieces
    try:
        writer = checkpoint_writer.CheckpointWriter(folder, policy)
        begun = writer.begin("new", trainer, write_small, lambda _: None, asynchronous=asynchronous)
        problem = begun or writer.finish()
    finally:
        checkpoint_writer.files_below, tensors.write_pieces = native_look, native_write
    over_writers = all(group is tensors.writers() for group in groups)
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, Published(problem, len(looks), over_writers))
    return everyones
