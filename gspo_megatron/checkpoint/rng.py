"""Saves and loads the state of every random number generator of a rank."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from gspo_megatron.checkpoint.folder import write_file
from gspo_megatron.errors import DataError
from gspo_megatron.files import WRONG_VALUES, make_folder, parse_json
from gspo_megatron.platform.collectives import raised_everywhere

FOLDER = "rng"
_TRACKER = "tracker."


def save_rng(folder: Path) -> None:
    """Write `folder`/rng/rank_NNNNN.safetensors; every rank calls this function."""
    tensors = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors["cuda"] = torch.cuda.get_rng_state().cpu()
    for name, state in get_cuda_rng_tracker().get_states().items():
        # A graph-safe tracker holds generators. Other trackers hold states of generators.
        state = state.get_state() if isinstance(state, torch.Generator) else state
        tensors[_TRACKER + name] = state.cpu()
    numpy_state = np.random.get_state(legacy=False)
    tensors["numpy"] = torch.from_numpy(numpy_state["state"]["key"].astype(np.int64))
    version, words, next_gauss = random.getstate()
    tensors["python"] = torch.tensor(words, dtype=torch.int64)
    details = {
        "layout": _layout(),
        "numpy": [
            int(numpy_state["state"]["pos"]),
            int(numpy_state["has_gauss"]),
            float(numpy_state["gauss"]).hex(),
        ],
        "python": [version, None if next_gauss is None else next_gauss.hex()],
    }
    path = _path(folder, dist.get_rank())
    make_folder(path.parent)
    content = save(
        {name: t.contiguous().clone() for name, t in tensors.items()},
        {"rng": json.dumps(details)},
    )
    write_file(path, content)


def load_rng(folder: Path) -> bool:
    """Set this rank's generators to the state that save_rng wrote. Every rank calls this function.
    If a run on another layout or kind of device wrote the state, the function returns False on all
    ranks and leaves the generators unchanged. Raises DataError, the same on all ranks.
    """
    same = True
    with raised_everywhere():
        for rank in (0, dist.get_rank()):  # rank 0's file exists even if there are more ranks now
            if same:
                details, tensors = _read(_path(folder, rank))
                same = details["layout"] == _layout()
    if not same:
        return False
    with raised_everywhere():
        try:
            _set(details, tensors)
        except (RuntimeError, *WRONG_VALUES) as error:
            path = _path(folder, dist.get_rank())
            raise DataError(f"{path}: not the state of this program: {error}") from None
    return True


def _set(details: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    version, gauss = details["python"]
    words = tuple(tensors["python"].tolist())
    random.setstate((version, words, None if gauss is None else float.fromhex(gauss)))
    position, has_gauss, gauss = details["numpy"]
    keys = tensors["numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, position, has_gauss, float.fromhex(gauss)))
    tracker = get_cuda_rng_tracker()
    states = tracker.get_states()
    for name, state in states.items():
        saved = tensors[_TRACKER + name]
        if isinstance(state, torch.Generator):
            state.set_state(saved)
        else:
            states[name] = saved
    tracker.set_states(states)
    if torch.cuda.is_available() and "cuda" in tensors:
        torch.cuda.set_rng_state(tensors["cuda"])
    torch.set_rng_state(tensors["torch"])


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        with safe_open(path, framework="pt") as file:
            details = parse_json(file.metadata()["rng"])
            return details, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no dict)
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except (SafetensorError, OSError, *WRONG_VALUES) as error:
        raise DataError(f"{path}: cannot be read: {error}") from None


def _layout() -> dict[str, Any]:
    """Return the kind of device and the layout, which must be the same for the states to fit."""
    return {
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        "world": dist.get_world_size(),
        "tp": parallel_state.get_tensor_model_parallel_world_size(),
        "pp": parallel_state.get_pipeline_model_parallel_world_size(),
        "vpp": parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1,
        "cp": parallel_state.get_context_parallel_world_size(),
        "ep": parallel_state.get_expert_model_parallel_world_size(),
        "etp": parallel_state.get_expert_tensor_parallel_world_size(),
    }


def _path(folder: Path, rank: int) -> Path:
    return folder / FOLDER / f"rank_{rank:05d}.safetensors"
