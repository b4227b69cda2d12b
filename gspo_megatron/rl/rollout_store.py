"""The responses of one step on the disk, for a run that stops between them and their update, or to
compute a step again.

Rollouts take most of a step. Each data rank writes its share as a `RolloutGroup`; routes are
written by the pipeline stage that has them. A run on another layout reads the sequences of its own
groups out of all files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors import SafetensorError, safe_open

from gspo_megatron.checkpoint.folder import write_file
from gspo_megatron.files import WRONG_VALUES, make_folder
from gspo_megatron.models.build import Policy
from gspo_megatron.platform.collectives import raise_everywhere
from gspo_megatron.rl.rollouts import Experience
from gspo_megatron.rollout.types import RolloutGroup
from gspo_megatron.routing.hooks import attach_hooks
from gspo_megatron.types import Sample

FOLDER = "rollouts"


def write_rollouts(experience: Experience, folder: Path) -> None:
    """Write this rank's share below `folder`; every rank calls it. Raises OSError."""
    if parallel_state.get_tensor_model_parallel_rank() > 0:
        return  # the first has the same
    stage = parallel_state.get_pipeline_model_parallel_rank()
    if stage > 0 and experience.group.routes is None:
        return
    data_rank = parallel_state.get_data_parallel_group(with_context_parallel=True).rank()
    name = f"rank_{dist.get_rank():05d}_data_{data_rank:05d}_stage_{stage:03d}.safetensors"
    path = folder / FOLDER / name
    make_folder(path.parent)
    write_file(path, experience.group.save(routes_only=stage > 0))


def read_experience(folder: Path, description: dict[str, Any], policy: Policy) -> Experience:
    """What `write_rollouts` and `Experience.describe` left, as this rank's share in the present
    layout; every rank calls it. Raises DataError, the same on all ranks."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    share, samples, error = None, [], None
    try:
        samples = [Sample(**sample) for sample in description["samples"]]
        share = read_share(
            folder / FOLDER, group.rank(), group.size(), lambda: attach_hooks(policy.models)
        )
    except (OSError, SafetensorError, RuntimeError, *WRONG_VALUES) as found:
        error = f"{folder / FOLDER}: cannot be read: {found}"
    raise_everywhere(error)
    assert share is not None
    rest: dict[str, Any] = {**description, "samples": samples}
    return Experience(share, torch.device(torch.cuda.current_device()), **rest)


def read_share(
    folder: Path, rank: int, size: int, layers: Callable[[], Sequence[int]]
) -> RolloutGroup:
    """The groups whose number leaves `rank` when divided by `size`, as rollouts deal them out; of
    the routes, if there are any, the numbered layers. One data rank's file is in memory at a time.

    Raises OSError, SafetensorError, DataError and KeyError if a file is not as `write_rollouts`
    left it.
    """
    shares: list[RolloutGroup] = []
    for path in sorted(folder.glob("*_stage_000.safetensors"), key=_data_rank):
        with safe_open(path, framework="np") as file:
            mine = file.get_tensor("group_index") % size == rank
        if shares and not mine.any():
            continue
        share = RolloutGroup.load(path.read_bytes())
        if share.routes is not None:
            share = _with_routes(share, path, layers())
        shares.append(share.select(mine))
    return RolloutGroup.join(shares)


def _with_routes(share: RolloutGroup, first_stage: Path, wanted: Sequence[int]) -> RolloutGroup:
    """With the routes of the wanted layers, from the files of all stages of its data rank."""
    assert share.routes is not None
    routes, layers = [share.routes[:, :0]], []
    for path in sorted(first_stage.parent.glob(f"*_data_{_data_rank(first_stage):05d}_*")):
        with safe_open(path, framework="np") as file:
            present = [layer for layer in file.get_tensor("layers").tolist() if layer in wanted]
            if present:
                stage = replace(share, routes=file.get_tensor("routes"))
                stage.layers = file.get_tensor("layers")
                routes.append(stage.of_layers(present).routes)
                layers += present
    share = replace(share, routes=np.concatenate(routes, 1), layers=np.array(layers, np.int64))
    return share.of_layers(wanted)


def _data_rank(path: Path) -> int:
    return int(path.name.split("_")[3])
