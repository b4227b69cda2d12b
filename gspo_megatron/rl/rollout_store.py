"""The responses of one step on the disk, for a run that stops between them and their update.

Rollouts take most of a step. Each data rank writes what it sampled as flat tensors; a run on
another layout reads the sequences of its own groups out of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from gspo_megatron.checkpoint.folder import write_file
from gspo_megatron.files import WRONG_VALUES, make_folder
from gspo_megatron.models.build import Policy
from gspo_megatron.platform.collectives import raise_everywhere
from gspo_megatron.rl.rollouts import Experience, Scores, select_sequences
from gspo_megatron.routing.hooks import attach_hooks
from gspo_megatron.types import RolloutBatch, Sample

FOLDER = "rollouts"


def write_rollouts(experience: Experience, folder: Path, policy: Policy) -> None:
    """Write this rank's tensors below `folder`; every rank calls it. Raises OSError."""
    if parallel_state.get_tensor_model_parallel_rank() > 0:
        return  # the first has the same
    stage = parallel_state.get_pipeline_model_parallel_rank()
    tensors: dict[str, Tensor] = {}
    if stage == 0:
        tensors = vars(experience.batch) | vars(experience.scores)
        tensors.pop("routes")
        tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    if experience.batch.routes is not None:
        layers = attach_hooks(policy.models)
        tensors |= {"routes": experience.batch.routes, "layers": torch.tensor(layers)}
    if not tensors:
        return
    data_rank = parallel_state.get_data_parallel_group(with_context_parallel=True).rank()
    name = f"rank_{dist.get_rank():05d}_data_{data_rank:05d}_stage_{stage:03d}.safetensors"
    path = folder / FOLDER / name
    make_folder(path.parent)
    write_file(path, save({n: t.detach().cpu().contiguous() for n, t in tensors.items()}))


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
    device = torch.device(torch.cuda.current_device())
    for record in (share.batch, share.scores):
        for name, tensor in vars(record).items():
            setattr(record, name, None if tensor is None else tensor.to(device))
    rest: dict[str, Any] = {**description, "samples": samples}
    return Experience(share.batch, share.scores, **rest)


def read_share(
    folder: Path, rank: int, size: int, layers: Callable[[], Sequence[int]]
) -> Experience:
    """The groups whose number leaves `rank` when divided by `size`, as rollouts deal them out; of
    the routes, if there are any, the numbered layers. One data rank's file is in memory at a time.

    Raises OSError, SafetensorError and KeyError if a file is not as `write_rollouts` left it.
    """
    parts: list[Experience] = []
    for path in sorted(folder.glob("*_stage_000.safetensors"), key=_data_rank):
        with safe_open(path, framework="pt") as file:
            mine = file.get_tensor("group_index") % size == rank
            if parts and not mine.any():
                continue
            names = set(file.keys()) - {"routes", "layers"}
            stored = {name: file.get_tensor(name) for name in names}
            has_routes = "routes" in file.keys()  # noqa: SIM118 (no mapping)
        scores = Scores(**{each.name: stored.pop(each.name) for each in fields(Scores)})
        routes = _routes(path, layers()) if has_routes else None
        batch = select_sequences(RolloutBatch(**stored, routes=routes), mine)
        parts.append(Experience(batch, scores.select(mine)))
    return Experience.join(parts)


def _routes(first_stage: Path, wanted: Sequence[int]) -> Tensor:
    """[tokens, wanted layers, k] of one data rank, from the files of all its stages."""
    found: dict[int, Tensor] = {}
    nothing = None
    for path in first_stage.parent.glob(f"*_data_{_data_rank(first_stage):05d}_*"):
        with safe_open(path, framework="pt") as file:
            layers = file.get_tensor("layers").tolist()
            if nothing is None or set(wanted).intersection(layers):
                routes = file.get_tensor("routes")
                nothing = routes[:, :0]
                found |= {layer: routes[:, row] for row, layer in enumerate(layers)}
    assert nothing is not None, "no stage recorded routes"
    chosen = [found[layer] for layer in wanted]
    return torch.stack(chosen, dim=1) if chosen else nothing


def _data_rank(path: Path) -> int:
    return int(path.name.split("_")[3])
