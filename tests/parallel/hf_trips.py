"""What the ranks do in test_hf_layouts."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from gspo_megatron.checkpoint.hf.export import export_hf, stream_hf
from gspo_megatron.config import resolve_parallel
from gspo_megatron.errors import DataError
from gspo_megatron.models.build import Policy
from gspo_megatron.platform.groups import set_up_model_parallel
from tests.unit.checkpoint.hf.mistakes import mistaken
from tests.unit.checkpoint.hf.policies import config_of, greedy, policy_of


def round_trip(
    source: Path,
    target: Path,
    dtype: str,
    layout: str,
    prompts: list[list[int]] | None = None,
    mistake: str | None = None,
    exporting: bool = True,
) -> tuple[list[list[int]], list[list[float]]] | None:
    """Import, export; and between, where there are prompts, continue them. `mistake`: of the map,
    importing and perhaps exporting."""
    wrong = mistaken(mistake, importing=True, exporting=exporting) if mistake else nullcontext()
    with wrong:
        policy = _policy(source, dtype, layout)
        found = greedy(policy, prompts, count=10) if prompts else None
        original = json.loads((source / "config.json").read_text())
        export_hf(policy, target, hf_config=original, max_shard_bytes=40_000)
    return found


def failed_export(source: Path, target: Path, layout: str) -> str:
    """What the last rank hears of an export that cannot be written."""
    policy = _policy(source, "float32", layout)
    try:
        export_hf(policy, target)
        told = ["nothing"]
    except DataError as error:
        told = [str(error)]
    dist.broadcast_object_list(told, src=dist.get_world_size() - 1)
    return told[0]


def streamed_everywhere(source: Path, dtype: str, layout: str) -> dict[str, Tensor]:
    """The stream as the last rank sees it, sent to the first."""
    policy = _policy(source, "float32", layout)
    wanted = getattr(torch, dtype)
    tensors = {}
    for name, tensor in stream_hf(policy, dtype=wanted, everywhere=True):
        assert tensor is not None and tensor.dtype == wanted
        tensors[name] = tensor.clone()
    seen = [tensors]
    dist.broadcast_object_list(seen, src=dist.get_world_size() - 1)
    return seen[0]


def _policy(source: Path, dtype: str, layout: str) -> Policy:
    config = config_of(source, dtype, layout)
    parallel = resolve_parallel(config, dist.get_world_size())
    set_up_model_parallel(parallel, config.training.seed)
    return policy_of(config)
